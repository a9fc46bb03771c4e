"""Replay: the steps of a journal, sent to shards once more, and their answers compared with those recorded."""
