"""The launcher: starts, watches and stops the router and the shards."""
