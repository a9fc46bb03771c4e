"""OpenAI's chats, text completions and list of models.

Entry points: `routes.register`, `completion_routes.register`.
Imports: adapters, api.body, api.chat, engine, errors, request, server, text, tool_calls.
"""
