"""Replicas side by side behind gateways: a cell shares one clock, and cells share nothing.

Entry point: `cell.Cell`.
May import: what the simulator may.
"""
