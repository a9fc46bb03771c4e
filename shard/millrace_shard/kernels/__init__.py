"""The few operations that differ by device, behind one interface."""
