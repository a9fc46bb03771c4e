"""Whether answers under plain JSON schemas are whole and valid: `python -m bench.structured_output.everyday`."""
