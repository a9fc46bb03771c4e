"""The request of a chat in the form that all its dialects share: messages, tools, sampling.

Entry point: `chat.Chat`.
May import: api.body, validation, tool_calls, text, request and below.
"""
