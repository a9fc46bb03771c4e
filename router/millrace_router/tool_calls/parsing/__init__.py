"""What call formats share: the bases of formats, their parsers, readers and grammars.

Entry points: `call_format.CallFormat` for calls that are JSON objects, `block_format.BlockFormat` for others, of which
`xml_format` has parameters in tags and `expression_format` expressions.
Imports: errors, request, tool_calls.
"""
