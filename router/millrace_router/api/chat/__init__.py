"""A chat, from the form that all dialects share to its prompt, its start and the choices that are read of it.

Entry points: `chat.Chat`, `start.start_chat`, `choice.read_choice`.
Imports: api.body, engine, errors, reasoning, request, server, text, tool_calls, tool_calls.parsing, version.
"""
