"""The schedule journal: what was said between router and shards, on disk, so that it can be said again."""
