"""Starts, monitors, restarts and stops the children.

Entry point: `launcher.Launcher`.
May import: settings, banner, demo, logs.
"""
