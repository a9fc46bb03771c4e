"""Signals to shards under streams: `kills.py` on one model, `model_kills.py` on several kinds of models."""
