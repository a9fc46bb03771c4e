"""The scheduler under a virtual clock: what a deployment would do, without its hardware."""
