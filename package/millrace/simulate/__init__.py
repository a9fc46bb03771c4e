"""The router's scheduler under a virtual clock, to size a server: `millrace simulate`.

Entry points: `__main__.main`, `simulation.simulate`, `engine.Engine`.
Imports: charts, errors, millrace_router.
"""
