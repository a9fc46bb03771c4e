"""Many replicas: what the ingress costs and what routing by prefixes brings. `python -m bench.scale COMMAND`."""
