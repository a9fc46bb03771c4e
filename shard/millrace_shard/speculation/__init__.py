"""Guessing the next tokens of a sequence, so that one forward pass may yield several."""
