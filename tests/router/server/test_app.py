"""Properties of every route: keys, CORS, request ids, log lines, health."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import orjson

from millrace.simulate.deployment import Deployment
from millrace_router.prediction.cost import COEFFICIENTS, EXTRA_COEFFICIENTS, CostModel
from millrace_router.validation.sampling_defaults import SamplingDefaults
from millrace_testing.router.edge import logging_to, play, serving

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
HEALTH = ("/", "/health", "/ping", "/livez", "/readyz")
POSTS = ("/", "/generate", "/generate_stream", "/tokenize", "/v1/chat/completions", "/v1/estimate")


async def test_the_key_opens() -> None:
    async with serving(api_key="sécret") as edge:
        headers = {"authorization": "Bearer sécret"}
        assert (await edge.post("/generate", ASKED, headers=headers))[0] == 200


async def test_request_ids_are_echoed_or_made() -> None:
    async with serving() as edge:
        for path in ("/generate", "/generate_stream", "/nothing"):
            _, _, response = await edge.post(path, ASKED, headers={"x-request-id": "mine 1"})
            assert response.headers["x-request-id"] == "mine 1"
            made = {(await edge.post(path, ASKED))[2].headers["x-request-id"] for _ in range(2)}
            assert len(made) == 2
        _, _, response = await edge.post("/generate", ASKED, headers={"x-request-id": "x" * 129})
        assert response.headers["x-request-id"] != "x" * 129


async def test_info_has_the_fields_of_every_version() -> None:
    async with serving() as edge:
        _, body, _ = await edge.get("/info")
    info = orjson.loads(body)
    expected = {
        "model_id": "org/tiny",
        "model_sha": "abc",
        "model_dtype": "float32",
        "model_device_type": "cpu",
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": 4,
        "max_best_of": 2,
        "max_n": 3,
        "speculate": 2,
        "grammars": True,
        "max_stop_sequences": 4,
        "max_input_tokens": 8,
        "max_total_tokens": 16,
        "max_batch_total_tokens": 32,
        "validation_workers": 2,
        "max_client_batch_size": 4,
        "router": "text-generation-router",
    }
    assert {name: info[name] for name in expected} == expected
    assert info.keys() >= {
        "waiting_served_ratio", "max_waiting_tokens", "max_batch_size", "version", "sha", "docker_label"
    }  # fmt: skip


async def test_info_has_costs_only_if_requested() -> None:
    costs = dict.fromkeys((*COEFFICIENTS, *EXTRA_COEFFICIENTS), 0.5)
    async with serving(cost=CostModel.fixed(costs)) as edge:
        plain = orjson.loads((await edge.get("/info"))[1])
        full = orjson.loads((await edge.get("/info?costs=true"))[1])
        assert orjson.loads((await edge.get("/info?costs=false"))[1]) == plain
    costs_alone = {"cost_model", "step_ratios", "entry_seconds", "turn_seconds"}
    assert full.keys() - plain.keys() == costs_alone
    assert full["cost_model"] == costs


async def test_info_has_the_defaults_of_absent_parameters() -> None:
    defaults = SamplingDefaults(temperature=0.5, top_k=20)
    async with serving(defaults=defaults, resume_grace=7.0) as edge:
        info = orjson.loads((await edge.get("/info"))[1])
    assert info["sampling_defaults"] == {"temperature": 0.5, "top_k": 20}
    assert info["resume_grace"] == 7.0


async def test_info_describes_the_scheduler() -> None:
    async with serving() as edge:
        info = orjson.loads((await edge.get("/info?costs=true"))[1])
    expected: dict[str, object] = {
        "prefill_chunking": "on",
        "prefix_caching": "on",
        "kv_reservation": "grow",
        "target_inter_token_latency": None,
        "fairness": "none",
        "priority_ageing": 10.0,
        "max_queue_size": None,
        "max_queue_wait": None,
        "steps_in_flight": 2,
        "block_size": 4,
        "num_blocks": 9,
        "cost_model": {},
    }
    assert {name: info[name] for name in expected} == expected


async def test_info_is_what_a_simulated_deployment_is_made_of() -> None:
    costs = dict.fromkeys((*COEFFICIENTS, *EXTRA_COEFFICIENTS), 0.5)
    flags: dict[str, Any] = {
        "prefix_caching": "off",
        "kv_reservation": "full",
        "target_inter_token_latency": 25.0,
        "fairness": "tenant",
        "priority_ageing": 3.0,
        "max_queue_size": 7,
        "max_queue_wait": 2.5,
        "steps_in_flight": 1,
    }
    async with serving(cost=CostModel.fixed(costs), **flags) as edge:
        info = orjson.loads((await edge.get("/info?costs=true"))[1])
    fields = {name: info[name] for name in Deployment.model_fields if name in info}
    deployment = Deployment.model_validate(fields)
    assert fields.keys() == Deployment.model_fields.keys()
    assert deployment.cost_model == costs
    assert {name: getattr(deployment, name) for name in flags} == flags
    assert (deployment.num_blocks, deployment.block_size) == (9, 4)


async def test_info_has_the_prefill_tokens_in_force() -> None:
    async with serving() as edge:
        assert edge.services.config.max_batch_prefill_tokens is None
        _, body, _ = await edge.get("/info")
    assert orjson.loads(body)["max_batch_prefill_tokens"] == 32


async def test_a_megabyte_does_not_stop_health() -> None:
    async with serving() as edge:
        long = {"inputs": "a " * 500_000}
        post = asyncio.create_task(edge.post("/generate", long))
        while not post.done():
            assert (await edge.get("/health"))[0] == 200
        status, body, _ = await post
    assert status == 422
    assert "500000 `inputs` tokens and 0 `max_new_tokens`" in body["error"]


async def test_draining_refuses_with_503_and_lets_streams_finish() -> None:
    async with serving(None) as edge:
        running = asyncio.create_task(edge.post("/generate_stream", ASKED))
        await edge.batcher.arrived.wait()
        edge.services.infer.drain()
        for path in ("/", "/generate", "/generate_stream"):
            status, body, _ = await edge.post(path, ASKED)
            assert (status, body["error_type"]) == (503, "unavailable")
        assert (await edge.get("/health"))[0] == 503
        play(edge.batcher.streams[0], "x", "y")
        status, text, _ = await running
        assert status == 200
        assert orjson.loads(text.split("\n\n")[1][6:])["generated_text"] == "xy"


async def test_a_request_is_logged_on_one_line_without_its_text() -> None:
    output = io.BytesIO()
    with logging_to(output):
        async with serving() as edge:
            await edge.post("/generate", {"inputs": "hello world"}, headers={"x-request-id": "r1"})
            await edge.post("/generate_stream", ASKED, headers={"x-request-id": "r2"})
            await edge.get("/nothing", headers={"x-request-id": "r3"})
    assert b"hello" not in output.getvalue()
    assert b" x" not in output.getvalue()
    lines = {}
    for line in map(orjson.loads, output.getvalue().splitlines()):
        if line["fields"]["message"] == "request":
            assert line.keys() == {"timestamp", "level", "fields", "target"}
            lines[line["fields"]["request_id"]] = line["fields"]
    assert lines.keys() == {"r1", "r2", "r3"}
    assert lines["r1"]["route"] == "/generate"
    assert lines["r1"]["status"] == 200
    assert (lines["r1"]["prompt_tokens"], lines["r1"]["generated_tokens"]) == (2, 3)
    assert {"queue_time", "inference_time", "time_per_token", "total_time"} <= lines["r1"].keys()
    assert (lines["r2"]["prompt_tokens"], lines["r2"]["generated_tokens"]) == (1, 2)
    assert lines["r3"]["status"] == 404
