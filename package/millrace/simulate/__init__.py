"""The router's scheduler under a virtual clock, to size a server: `millrace simulate`.

Entry points: `__main__.main`, `simulation.simulate`, `engine.Engine`.
May import: charts, and the router's scheduler, request, prediction, adapters and config.
"""
