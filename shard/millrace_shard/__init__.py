"""The shard runs forward passes over token ids on one device; it handles neither HTTP nor text."""
