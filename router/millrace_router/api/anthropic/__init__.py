"""Anthropic's messages, turned into a chat and back.

Entry point: `routes.register`.
Imports: api.body, api.chat, engine, errors, reasoning, request, server, text, tool_calls.
"""
