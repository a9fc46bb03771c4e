"""Properties of every route: keys, CORS, request ids, log lines, health."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from millrace.simulate.deployment import Deployment
from millrace_router.prediction.cost import COEFFICIENTS, EXTRA_COEFFICIENTS, CostModel
from millrace_router.validation.sampling_defaults import SamplingDefaults
from millrace_testing.router.edge import play, serving

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}


async def test_the_right_key_is_accepted() -> None:
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


async def test_a_simulated_deployment_can_be_made_from_info() -> None:
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
    of_images = {"feature_rows", "image_slots", "encoder_layers"}
    assert fields.keys() == Deployment.model_fields.keys() - of_images
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
