"""The demo model: the facts it knows, the corpus made of them, and the training that writes `model/`."""
