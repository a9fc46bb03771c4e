"""Parameters of a tool one by one, for formats that write each of them: their types, values and grammars.

Entry points: `kinds.kinds_of`, `text_value.read_value`, `object_schema.ObjectSchema`.
May import: tool_calls' own modules below `blocks`, and what these import.
"""
