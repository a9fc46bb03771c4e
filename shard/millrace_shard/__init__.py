"""The shard runs forward passes over token ids on one device; it knows neither HTTP nor text."""
