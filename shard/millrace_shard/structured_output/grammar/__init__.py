"""Translates the grammars of users to llguidance's Lark, and refuses schemas that llguidance would not enforce.

Entry point: `grammar_source.lark_of`.
May import: batch.sequence (for `Grammar`).
"""
