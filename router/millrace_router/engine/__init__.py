"""From a valid request to its tokens: permits, the batcher and its loop.

Entry points: `infer.Infer`, `batcher.Batcher`.
Imports: adapters, errors, prediction, recovery, request, scheduler, shards, telemetry, validation.
"""
