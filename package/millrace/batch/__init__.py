"""Batches in OpenAI's file format: requests from one file, answers to another.

Entry point: `run.run_batch`. May import: http, errors.
"""
