"""Models that the package index has as wheels; `fetch_published` is the entry point."""
