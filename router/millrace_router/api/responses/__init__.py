"""OpenAI's responses, turned into a chat and back.

Entry point: `routes.register`.
Imports: access, api.body, api.chat, engine, errors, request, server, text, tool_calls, validation.
"""
