"""A model as a Python object: without HTTP in this process, or over HTTP at a URL.

Entry points: `llm.LLM`, `async_llm.AsyncLLM`. May import: http, errors.
"""
