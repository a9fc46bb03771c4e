"""The cost of grammars, and the validity of what is generated under them: `python -m bench.structured_output`."""
