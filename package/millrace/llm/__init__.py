"""A model as a Python object: without HTTP in this process, or over HTTP at a URL.

Entry points: `llm.LLM`, `async_llm.AsyncLLM`.
Imports: errors, http, images, millrace_launcher, millrace_proto, millrace_router.
"""
