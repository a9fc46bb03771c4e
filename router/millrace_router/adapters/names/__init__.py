"""Names of adapters: what they stand for, and who may use them.

Entry point: `resolver.Resolver`.
May import: request, telemetry, errors, config.
"""
