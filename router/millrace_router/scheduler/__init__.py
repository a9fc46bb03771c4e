"""Pure decisions: which rows run in the next step, and in which blocks.

Entry points: `planner.Planner`, `factory.planner_from`.
May import: request, prediction, config. No I/O, no clock.
"""
