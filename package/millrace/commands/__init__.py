"""The commands of `millrace`, one module each; `main` takes the arguments and returns the exit code.

Entry point: each module's `main`. May import: every other room.
"""
