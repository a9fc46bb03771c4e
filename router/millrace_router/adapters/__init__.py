"""LoRA adapters: names and versions, fetching and checking, and which of them the shards hold.

May import `scheduler` and the rooms below it. Only the fetching process reads folders, the network and tokens.
"""
