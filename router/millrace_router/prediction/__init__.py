"""Pure forecasts: the cost of a step, and when a request is served.

Entry points: `cost.CostModel`, `forecast.Forecaster`.
Imports: scheduler.
"""
