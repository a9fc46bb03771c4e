"""Generated wire types of the contract in `generate.proto`; built by `proto/compile.py`, never committed."""
