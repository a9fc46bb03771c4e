"""Families with norms before attention and feed-forward, as Llama has them.

Entry point: `llama.llama_spec`, on which most pages build.
"""
