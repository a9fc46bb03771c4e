"""Tokenizer, detokenizer, stop sequences and chat templates.

Entry points: `tokenizer.Tokenizer`, `chat_template.ChatTemplate`.
Imports: errors, millrace_proto.
"""
