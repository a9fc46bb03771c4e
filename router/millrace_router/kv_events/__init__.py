"""KV-cache events: report to gateways which blocks the prefix cache has, in vLLM's format over ZeroMQ.

Entry points: `recorder.EventRecorder`, whose caches record what happens to their blocks, and
`publisher.EventPublisher`, which sends it. Only the publisher imports ZeroMQ.
Imports: request, scheduler.
"""
