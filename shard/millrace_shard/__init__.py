"""The shard: forward passes over token ids on one device. No HTTP, no text."""
