"""Ends the text of a grammar within a number of tokens: a short way to its end, taken when the rest only just suffices.

Entry points: `closing.Closing`, `closing_tokens.ClosingTokens`.
May import: nothing of the shard.
"""
