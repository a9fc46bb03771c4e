"""The figures of `/status`, and where `/metrics` has them."""

from __future__ import annotations

import orjson
from yarl import URL

from millrace_router.api.tgi.probes import RECENT
from millrace_testing.router.edge import play, serving

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 4}}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_metrics_are_at_one_path_that_proxies_can_close() -> None:
    async with serving() as edge:
        for path, status in (("/metrics", 200), ("/metrics?a=%6d", 200), ("/%6detrics", 404)):
            async with edge.client.get(URL(edge.url + path, encoded=True)) as answer:
                assert answer.status == status


async def test_the_figures_are_those_of_the_metrics() -> None:
    async with serving(lambda _, stream: play(stream, "a", "b", "a", "b")) as edge:
        metrics = edge.services.metrics
        now = 0.0
        edge.runner.app[RECENT]._clock = lambda: now
        edge.runner.app[RECENT]._started_at = now
        edge.runner.app[RECENT]._readings.append(edge.runner.app[RECENT]._read())
        metrics.kv_blocks.set(40)
        metrics.kv_blocks_in_use.set(10)
        metrics.kv_blocks_cached.set(4)
        metrics.requests_running.set(3)
        metrics.requests_waiting.set(2)
        metrics.recoveries.labels(reason="lost").inc()
        metrics.recoveries.labels(reason="hung").inc(2)
        metrics.prefill_tokens.inc(1)
        metrics.prefix_cache_hit_tokens.inc(3)
        for _ in range(5):
            assert (await edge.post("/generate", ASKED))[0] == 200
        now = 10.0
        status, body, answer = await edge.get("/status")
    found = orjson.loads(body)
    assert (status, answer.content_type) == (200, "application/json")
    assert 0 < found.pop("first_token_median_seconds") <= found.pop("first_token_p95_seconds")
    assert found.pop("version")
    assert found == {
        "model_id": "org/tiny",
        "ready": True,
        "reason": None,
        "uptime_seconds": 10.0,
        "requests_running": 3,
        "requests_waiting": 2,
        "max_concurrent_requests": 4,
        "kv_use": 0.25,
        "kv_cached": 0.1,
        "recoveries": 3,
        "window_seconds": 10.0,
        "tokens_per_second": 2.0,
        "cached_share": 0.75,
    }


async def test_nothing_is_read_without_a_request() -> None:
    async with serving(lambda _, stream: play(stream, "a", "b")) as edge:
        for _ in range(3):
            await edge.post("/generate", ASKED)
        assert len(edge.runner.app[RECENT]._readings) == 1


async def test_why_the_server_is_not_ready() -> None:
    async with serving(api_key="secret") as edge:
        edge.batcher.status.begin_outage("shard-0: killed")
        found = orjson.loads((await edge.get("/status"))[1])
        assert (found["ready"], found["reason"]) == (
            False,
            "the shards are recovering: shard-0: killed",
        )
        edge.services.infer.drain()
        found = orjson.loads((await edge.get("/status"))[1])
        assert not found["ready"]
        assert "shutting down" in found["reason"].lower()


async def test_a_browser_gets_the_page_and_programs_the_figures() -> None:
    async with serving() as edge:
        _, body, answer = await edge.get("/status", headers=BROWSER)
        assert (answer.content_type, answer.headers["cache-control"]) == ("text/html", "no-cache")
        assert b"<dl" in body
        _, _, answer = await edge.get("/status", headers={"accept": "*/*"})
        assert answer.content_type == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert "accept" in answer.headers["vary"]
