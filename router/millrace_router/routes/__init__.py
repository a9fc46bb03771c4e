"""HTTP handlers, one module per family of routes."""
