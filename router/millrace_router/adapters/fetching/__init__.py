"""The fetching process, `python -m millrace_router.adapters.fetching`: one fetch, merge or access check, and its end.

It alone touches the network, folders and tokens, and it alone loads numpy. A request comes as JSON on standard input,
the answer leaves as JSON on standard output, and the adapter as a canonical file in the cache. No other module of the
router imports it.
"""
