"""Pure forecasts: what a step costs, when a request is served.

Entry points: `cost.CostModel`, `forecast.Forecaster`.
May import: errors alone.
"""
