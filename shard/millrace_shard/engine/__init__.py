"""The one thread that owns device, model and batch: epochs, warm-up, KV capacity.

Entry points: `engine.Engine`, `warmup.warm_up`.
May import: model_runner and below.
"""
