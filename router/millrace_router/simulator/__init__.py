"""The scheduler under a virtual clock: `millrace-simulate`.

Entry points: `__main__.main`, `fleet.simulate`.
May import: scheduler, request, prediction, config.
"""
