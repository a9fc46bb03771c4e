"""Flame graphs as SVG text, with the shared parts of `millrace.charts`."""
