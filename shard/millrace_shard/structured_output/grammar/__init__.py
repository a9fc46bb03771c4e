"""A user's grammar as llguidance's Lark; refuses what cannot be kept.

Entry point: `grammar_source.lark_of`.
May import: batch.sequence (for `Grammar`).
"""
