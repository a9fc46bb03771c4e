"""Engines without HTTP, ours and the peers', each in a process of its own and all driven alike."""
