"""The fetching process, `python -m millrace_router.adapters.fetching`: one fetch, merge or access check, and its end.

Only this process touches the network, folders and tokens, and only it loads numpy and safetensors. A request comes as
JSON on standard input, the answer leaves as JSON on standard output, and the adapter as a canonical file in the cache.
No other module of the router imports it.
Imports: adapters, errors, process, request.
"""
