"""The commands of `millrace`, one module each; `main` takes the arguments and returns the exit code.

Entry point: each module's `main`.
Imports: batch, chat, download, errors, http, images, load, millrace_launcher, millrace_proto, millrace_shard, server.
"""
