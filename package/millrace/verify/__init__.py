"""`millrace-verify`: checks on the user's model that output does not depend on the batch.

Entry point: `__main__.main`.
Imports: errors, http, millrace_launcher, server.
"""
