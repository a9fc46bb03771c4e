"""Pure decisions: which rows run in the next step, and in which blocks.

Entry points: `planner.Planner`, `factory.budgets_from`.
No I/O, no clock.
Imports: config, prediction, request.
"""
