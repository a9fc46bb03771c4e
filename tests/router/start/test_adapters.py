"""The adapters of the flags at the start, with the real fetching process."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from millrace_router.config import RouterConfig
from millrace_router.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
)
from millrace_router.request.adapter import (
    PAGE_BYTES,
    AdapterReference,
    AdapterSource,
    MergeRecipe,
    MergeStrategy,
)
from millrace_router.start.adapters import OpenAdapters, open_adapters
from millrace_router.start.running import metrics_of
from millrace_router.start.shards import RouterDeployment, StartupError
from millrace_testing.adapters.fake_adapters import MODULE
from millrace_testing.adapters.hub_stub import HubStub, Repository, hub_stub
from millrace_testing.router.edge import FakeBatcher, logging_to, services_over

SERVICES = services_over(FakeBatcher())


def write_peft(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write an adapter of the only layer of the fake model, as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed)
    prefix = f"base_model.model.{MODULE.name}"
    tensors = {
        f"{prefix}.lora_A.weight": numbers.normal(size=(4, 8)).astype(np.float32),
        f"{prefix}.lora_B.weight": numbers.normal(size=(8, 4)).astype(np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def deployment_of(
    tmp_path: Path, *, pages: int = 4, lora: bool = True, **flags: Any
) -> RouterDeployment:
    config = RouterConfig(
        model_folder=tmp_path,
        model_id="base",
        adapter_cache=tmp_path / "cache",
        **flags,
    )
    info = replace(SERVICES.shard, adapter_modules=(MODULE,) if lora else ())
    capacity = replace(SERVICES.capacity, adapter_pages=pages)
    return RouterDeployment(config=config, info=info, capacity=capacity)


@asynccontextmanager
async def opened(tmp_path: Path, **options: Any) -> AsyncIterator[OpenAdapters]:
    deployment = deployment_of(tmp_path, **options)
    adapters = await open_adapters(deployment, metrics_of(deployment))
    assert adapters is not None
    try:
        yield adapters
    finally:
        await adapters.close()


async def test_adapters_of_all_flags_are_registered(tmp_path: Path) -> None:
    one, two = write_peft(tmp_path / "one"), write_peft(tmp_path / "two", seed=1)
    flags: dict[str, Any] = {
        "lora_adapters": f"a={one}",
        "lora_modules": f'{{"name": "b", "path": "{two}"}}',
        "adapter_id": "a",
        "preloaded_adapter_ids": str(two),
        "max_loras": 3,
    }
    async with opened(tmp_path, **flags) as adapters:
        resolver = adapters.resolver
        known = {one.name: one.current is not None for one in resolver.registry}
        assert known == {"a": True, "b": False, str(two): True}
        assert resolver.default == AdapterReference(name="a")
        first = await resolver.resolve(AdapterReference(name="a"), "me")
        other = await resolver.resolve(AdapterReference(name="b"), "me")
        assert first.num_slices == ((MODULE.name, 1),)
        assert first.digest != other.digest
        assert resolver.digests() == {first.digest, other.digest}
        assert (tmp_path / "cache" / first.digest / "adapter.safetensors").is_file()
        recipe = MergeRecipe(ids=("a", "b"), weights=(1.0, 0.5), strategy=MergeStrategy.CAT)
        merged = await resolver.resolve(AdapterReference(merged=recipe), "me")
        assert merged.digest not in resolver.digests()


@asynccontextmanager
async def hub_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HubStub]:
    """A hub with the files of `folder` as `org/a`."""
    async with hub_stub() as hub:
        hub.repositories["org/a"] = Repository.of_folder(folder)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


async def test_the_last_version_of_a_hub_that_is_down_at_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {"lora_modules": "a=org/a", "adapter_allow": "hub:org/*"}
    async with hub_of(write_peft(tmp_path / "one"), monkeypatch) as hub:
        async with opened(tmp_path, **flags, adapter_id="a") as adapters:
            first = await adapters.resolver.resolve(AdapterReference(name="a"), "me")
        hub.repositories["org/a"].status = 502
        output = io.BytesIO()
        with logging_to(output):
            async with opened(tmp_path, **flags, adapter_id="a") as adapters:
                assert await adapters.resolver.resolve(AdapterReference(name="a"), "me") == first
                registration = adapters.resolver.registry.get("a")
                assert registration is not None
                # The operator, who asks for new files, and clients, whose access the hub would check.
                with pytest.raises(AdapterUnavailable):
                    await adapters.resolver.reload(registration)
                with pytest.raises(AdapterUnavailable):
                    await adapters.resolver.resolve(AdapterReference(name="org/a"), "me")
        assert b"hub unreachable: serving the cached version" in output.getvalue()
        # A server with another limit has checked nothing.
        with pytest.raises(StartupError, match="502"):
            async with opened(tmp_path, **flags, adapter_id="a", max_lora_rank=8):
                pass
        del hub.repositories["org/a"]
        with pytest.raises(StartupError, match="does not exist"):
            async with opened(tmp_path, **flags, adapter_id="a"):
                pass


async def test_folders_below_the_root_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_peft(root / "mine")
    outside = write_peft(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    async with opened(tmp_path, adapter_root=root) as adapters:

        async def ask(name: str) -> str:
            reference = AdapterReference(name=name, source=AdapterSource.LOCAL)
            return (await adapters.resolver.resolve(reference, "me")).digest

        first = await ask("mine")
        for name in ("link", "../outside", str(outside), "none"):
            with pytest.raises((AdapterNotFound, AdapterInvalid)):
                await ask(name)
        write_peft(root / "mine", seed=2)
        assert await ask("mine") != first


async def test_versions_that_are_registered_or_in_use_stay_in_the_cache(tmp_path: Path) -> None:
    one = write_peft(tmp_path / "one")
    async with opened(tmp_path, lora_modules=f"a={one}", adapter_id="a") as adapters:
        adapters.in_use = lambda: {"used"}
        assert adapters.fetcher._needed() == {*adapters.resolver.digests(), "used"}
        assert len(adapters.resolver.digests()) == 1


async def test_an_adapter_larger_than_all_memory_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path / "one")
    flags = {"lora_modules": f"a={tmp_path / 'one'}"}
    async with opened(tmp_path, pages=0, **flags) as adapters:
        with pytest.raises(AdapterTooLarge, match=f"{PAGE_BYTES} bytes"):
            await adapters.resolver.resolve(AdapterReference(name="a"), "me")
    async with opened(tmp_path, max_lora_rank=3, **flags) as adapters:
        with pytest.raises(AdapterInvalid, match="4"):
            await adapters.resolver.resolve(AdapterReference(name="a"), "me")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_modules": "a=/x,a=/y"}, "two LoRA adapters have the name a"),
        ({"lora_modules": "base=/x"}, "the LoRA adapter base has the name of the model"),
        ({"lora_modules": "a=neither"}, "'neither' is neither a folder nor an id on the hub"),
        ({"lora_modules": "a=/x", "lora": False}, "start them with --enable-lora"),
        ({"adapter_allow": "hub:a/*", "lora": False}, "start them with --enable-lora"),
        ({"adapter_id": "/nowhere/a"}, "'/nowhere/a'"),
        ({"adapter_cache": "/proc/none"}, "cannot use --adapter-cache"),
    ],
)
async def test_failed_starts_name_the_cause(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    is_lora = flags.pop("lora", True)
    usual: dict[str, Any] = {"model_folder": tmp_path, "model_id": "base"}
    config = RouterConfig(**usual | {"adapter_cache": tmp_path} | flags)
    deployment = replace(deployment_of(tmp_path, lora=is_lora), config=config)
    with pytest.raises(StartupError, match=message):
        await open_adapters(deployment, metrics_of(deployment))


async def test_without_adapters_there_is_nothing(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path, lora=False)
    assert await open_adapters(deployment, metrics_of(deployment)) is None
    assert not (tmp_path / "cache").exists()
