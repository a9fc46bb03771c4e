"""Our engine and our server compared with their peers on the same requests, and with the roofline.

Entry points: `offline.run_cases` (engines without HTTP) and `served.run_levels` (servers over HTTP).
May import `bench.harness` and `bench.peers`.
"""
