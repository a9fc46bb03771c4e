"""Sequences whose prompts yield a hidden state, or logits, in place of tokens.

Entry points: `pooling.Pooling`, `pooled_sequences.PooledSequences`.
"""
