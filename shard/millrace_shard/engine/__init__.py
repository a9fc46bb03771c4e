"""The engine thread, which owns device, model and batch; epochs, warm-up and KV capacity.

Entry points: `engine.Engine`, `warmup.warm_up`.
May import: model_runner and below.
"""
