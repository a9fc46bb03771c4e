"""The halves of a decoder layer: their weights, and halves that are composed of single operators.

Entry point: `blocks.ComposedBlocks`.
"""
