"""Streams of two adapters and of the base keep their bytes over a killed shard and an overwritten folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from millrace_launcher.demo import demo_folder
from millrace_testing.adapters.peft_files import save_adapter
from millrace_testing.launcher.e2e import Server, launch

WIDE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEW_TOKENS = 150
SECONDS = 240
EACH = [
    (adapter, prompt)
    for adapter in ("", "a", "b")
    for prompt in ("What is decode?", "What is a shard?")
]
"""Adapter and prompt of each stream; the base has no name."""


def write(folder: Path, *, seed: int, targets: tuple[str, ...]) -> None:
    """Save an adapter of PEFT's for the demo model; a small alpha keeps random weights from overflow."""
    model = AutoModelForCausalLM.from_pretrained(demo_folder())
    save_adapter(folder, model=model, seed=seed, r=8, lora_alpha=0.02, target_modules=list(targets))


class Streams:
    """Streams of each adapter and of the base, with a count of their tokens."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.num_tokens = 0

    async def one(self, adapter: str, prompt: str) -> list[Any]:
        """The tokens with their log probabilities."""
        parameters: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        if adapter:
            parameters["adapter_id"] = adapter
        body, found = {"inputs": prompt, "parameters": parameters}, []
        async with self._http.stream("POST", "/generate_stream", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    event = json.loads(line[5:])
                    assert "error" not in event, event
                    found.append((event["token"]["id"], event["token"]["logprob"]))
                    self.num_tokens += 1
        assert len(found) == NEW_TOKENS
        return found

    async def all(self) -> list[list[Any]]:
        """All of them at once."""
        return await asyncio.gather(*(self.one(*each) for each in EACH))


async def disturb(server: Server, folder: Path, new: Path) -> None:
    """Overwrite the folder and kill the shard while all streams run; compare with each stream alone."""
    async with (
        asyncio.timeout(SECONDS),
        httpx.AsyncClient(base_url=server.url, timeout=None) as http,
    ):
        streams = Streams(http)
        alone = [await streams.one(*each) for each in EACH]
        assert len(set(map(tuple, alone))) == len(EACH)
        streams.num_tokens = 0
        mixed, shard = await server.caught(
            streams.all,
            is_time=lambda: streams.num_tokens > 2 * len(EACH),
            num_running=len(EACH),
        )
        shutil.copytree(new, folder, dirs_exist_ok=True)
        shard.kill()
        assert await mixed == alone
        again = [await streams.one(*each) for each in EACH]
        changed = [one != other for one, other in zip(alone, again, strict=True)]
        assert changed == [adapter == folder.name for adapter, _ in EACH]


def test_streams_keep_their_bytes_and_new_requests_get_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    a, b, new = tmp_path / "a", tmp_path / "b", tmp_path / "new"
    write(a, seed=1, targets=WIDE)
    write(b, seed=2, targets=("q_proj", "v_proj"))
    write(new, seed=3, targets=WIDE)
    flags = (f"--lora-modules=a={a}", f"--lora-modules=b={b}", f"--adapter-cache={tmp_path}/cache")
    with launch("--deterministic=on", *flags) as server:
        asyncio.run(disturb(server, a, new))
        metrics = server.metrics()
        assert metrics['millrace_recoveries_total{reason="lost"}'] == 1
        assert metrics["millrace_requests_replayed_total"] > 0
