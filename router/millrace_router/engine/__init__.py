"""From a valid request to its tokens: permits, the batcher and its loop.

Entry points: `infer.Infer`, `batcher.Batcher`.
May import: validation, recovery, shards, scheduler, request, text, prediction, telemetry.
"""
