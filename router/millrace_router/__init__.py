"""The router: requests, text, queueing, token budgets, KV blocks and batching. No torch."""
