"""One command that measures a machine with a GPU: the engine, the server and `transformers` beside its roofline."""
