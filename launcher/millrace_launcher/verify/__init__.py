"""`millrace-verify`: checks on the user's model that output does not depend on the batch.

Entry point: `__main__.main`.
May import: every other room of the launcher.
"""
