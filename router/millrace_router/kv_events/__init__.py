"""KV-cache events: tells routers of several servers which blocks the prefix cache has, in vLLM's format over ZeroMQ.

Entry points: `recorder.EventRecorder`, whose caches record what happens to their blocks, and
`publisher.EventPublisher`, which sends it. The publisher alone imports ZeroMQ. Imports `scheduler` and `request`.
"""
