"""The demo model: its facts, the corpus of them, and the training that writes `model/`."""
