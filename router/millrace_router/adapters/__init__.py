"""LoRA adapters: names and versions, fetching and checking, and which of them the shards hold.

Only the fetching process reads folders, the network and tokens.
Imports: config, errors, request, scheduler, telemetry.
"""
