"""Children of the launcher: their start, output and end, and a guard that survives the launcher.

Entry point: `children.Children`.
Imports: host, logs, settings.
"""
