"""The load generator: streams generations from a server and takes the time of each token.

Entry points: `load.run_level`, `measurement.summarise`.
Imports: charts, errors, http.
"""
