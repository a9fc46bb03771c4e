"""Merged adapters against PEFT's `add_weighted_adapter`; DARE's masks are drawn here by hand, one value at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import merge_utils
from safetensors.torch import load_file

from millrace_router.adapters.fetching.jobs import answer
from millrace_testing.adapters.fetch_jobs import MAX_BYTES, fetch_folder
from millrace_testing.adapters.peft_files import (
    as_of_peft,
    canonical_deltas,
    deltas,
    modules_of,
    random_adapter,
    tiny_llama,
)

LLAMA = modules_of(tiny_llama())
FIELDS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8},
    {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 2},
    {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 4, "lora_alpha": 3},
]
NAMES = ["a", "b", "c"]
WEIGHTS = [0.5, -1.25, 2.0]
MASK = (1 << 64) - 1


class Merging:
    """Three adapters in PEFT's model and in the cache."""

    def __init__(self, folder: Path, fields: list[dict[str, Any]] = FIELDS) -> None:
        self.cache = folder / "cache"
        self.model = tiny_llama()
        for seed, (name, own) in enumerate(zip(NAMES, fields, strict=True)):
            self.model = random_adapter(self.model, seed=seed, name=name, **own)
        with as_of_peft():
            self.model.save_pretrained(str(folder / "saved"))
        answers = [fetch_folder(folder / "saved" / name, self.cache, LLAMA) for name in NAMES]
        self.digests = [one["digest"] for one in answers]

    def ours(self, strategy: str, **options: Any) -> dict[str, Any]:
        request = {
            "job": "merge",
            "cache": str(self.cache),
            "limits": {"max_rank": 64, "max_bytes": MAX_BYTES, "timeout_seconds": 60.0},
            "digests": self.digests,
            "weights": WEIGHTS,
            "strategy": strategy,
            "density": 1.0,
            "majority_sign_method": "total",
        }
        return answer(request | options)

    def path(self, answered: dict[str, Any]) -> Path:
        return self.cache / str(answered["digest"]) / "adapter.safetensors"

    def theirs(self, strategy: str, **options: Any) -> Any:
        with as_of_peft():
            self.model.add_weighted_adapter(
                NAMES, WEIGHTS, "merged", combination_type=strategy, **options
            )
        return self.model

    def check(self, strategy: str, **options: Any) -> None:
        """Compare A and B of every module, not only their product."""
        tensors = load_file(self.path(self.ours(strategy, **options)))
        model = self.theirs(strategy, **options)
        names = set()
        for key, layer in model.base_model.model.named_modules():
            if "merged" in getattr(layer, "lora_A", {}):
                names.add(key)
                assert layer.scaling["merged"] == 1
                assert torch.equal(tensors[f"{key}.scales"], torch.ones(4))
                for part in ("lora_A", "lora_B"):
                    expected = getattr(layer, part)["merged"].weight.detach()
                    torch.testing.assert_close(
                        tensors[f"{key}.{part}"], expected, rtol=1e-5, atol=1e-6
                    )
        assert {key.rpartition(".")[0] for key in tensors} == names
        assert len(names) == 8


@pytest.fixture
def merging(tmp_path: Path) -> Merging:
    return Merging(tmp_path)


def test_linear_merging_matches_peft(merging: Merging) -> None:
    merging.check("linear")


@pytest.mark.parametrize("method", ["total", "frequency"])
@pytest.mark.parametrize("density", [0.01, 0.3, 0.75, 1.0])
def test_ties_merging_matches_peft(merging: Merging, density: float, method: str) -> None:
    merging.check("ties", density=density, majority_sign_method=method)


def uniform(key: bytes, index: int) -> float:
    """The number at `index` of the generator splitmix64, as its author publishes it, in [0, 1)."""
    state = (int.from_bytes(key[:8], "little") + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def masks_by_hand(merging: Merging) -> Callable[[torch.Tensor, float, bool], torch.Tensor]:
    """PEFT's pruning at random, but each tensor is found by its values, and has the mask of its name."""
    names: dict[bytes, tuple[int, str]] = {}
    for position, digest in enumerate(merging.digests):
        tensors = load_file(merging.cache / digest / "adapter.safetensors")
        for name, tensor in tensors.items():
            names[tensor.numpy().tobytes()] = position, name

    def prune(tensor: torch.Tensor, density: float, rescale: bool) -> torch.Tensor:
        assert rescale
        position, name = names[tensor.numpy().tobytes()]
        text = json.dumps([*merging.digests, position, name]).encode()
        key = hashlib.sha256(text).digest()
        kept = [uniform(key, index) < density for index in range(tensor.numel())]
        return tensor * torch.tensor(kept).reshape(tensor.shape) / density

    return prune


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("dare_linear", {"density": 0.5}),
        ("dare_linear", {"density": 1.0}),
        ("dare_ties", {"density": 0.3}),
        ("dare_ties", {"density": 0.8, "majority_sign_method": "frequency"}),
    ],
)
def test_dare_merging_matches_peft(
    merging: Merging, strategy: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_utils, "random_pruning", masks_by_hand(merging))
    merging.check(strategy, **options)


def test_a_mask_keeps_the_share_of_its_density(merging: Merging) -> None:
    answered = merging.ours("dare_linear", density=0.25)
    tensors = load_file(merging.path(answered))
    # down_proj has its values from one adapter alone.
    values = torch.cat([one.flatten() for key, one in tensors.items() if ".down_proj.lora" in key])
    assert 0.15 < (values != 0).float().mean() < 0.35
    assert merging.ours("dare_linear", density=0.25) == answered


def test_cat_is_the_exact_sum_of_any_ranks(tmp_path: Path) -> None:
    fields = [own | {"r": rank} for own, rank in zip(FIELDS, (3, 17, 5), strict=True)]
    fields[0] |= {"use_rslora": True}
    merging = Merging(tmp_path, fields)
    answered = merging.ours("cat")
    summed: dict[str, torch.Tensor] = {}
    for name, weight in zip(NAMES, WEIGHTS, strict=True):
        for module, delta in deltas(merging.model, name).items():
            summed[module] = summed.get(module, 0) + weight * delta
    ours = canonical_deltas(merging.path(answered))
    assert ours.keys() == summed.keys()
    for module, delta in summed.items():
        torch.testing.assert_close(ours[module], delta, rtol=1e-5, atol=1e-5)
    ranks = {name.rpartition(".")[2]: rank for name, rank, _ in answered["modules"]}
    assert ranks == {"q_proj": 25, "v_proj": 8, "down_proj": 17, "up_proj": 5}


def test_cat_keeps_the_bits_of_one_dtype(merging: Merging) -> None:
    tensors = load_file(merging.path(merging.ours("cat")))
    name = "model.layers.1.self_attn.q_proj"
    parts = [
        load_file(merging.cache / digest / "adapter.safetensors") for digest in merging.digests
    ]
    expected = torch.cat([part[f"{name}.lora_B"] for part in parts], dim=1)
    assert torch.equal(tensors[f"{name}.lora_B"], expected)


def test_biases_are_summed_by_cat_and_refused_by_the_others(tmp_path: Path) -> None:
    fields = [own | {"lora_bias": bias} for own, bias in zip(FIELDS, (1, 0, 1), strict=True)]
    fields = [own | {"lora_bias": bool(own["lora_bias"])} for own in fields]
    merging = Merging(tmp_path, fields)
    tensors = load_file(merging.path(merging.ours("cat")))
    name = "model.layers.0.self_attn.q_proj"
    layer = merging.model.base_model.model.get_submodule(name)
    expected = sum(
        weight * layer.scaling[of] * layer.lora_B[of].bias.detach()
        for of, weight in (("a", WEIGHTS[0]), ("c", WEIGHTS[2]))
    )
    torch.testing.assert_close(tensors[f"{name}.bias"], expected)
    refused = merging.ours("linear")
    assert refused == {"error": "invalid", "reason": refused["reason"]}
    assert "linear is not defined for the bias of 'model.layers." in refused["reason"]


def test_other_ranks_are_named(tmp_path: Path) -> None:
    merging = Merging(tmp_path, [FIELDS[0], FIELDS[1] | {"r": 6}, FIELDS[2]])
    for strategy in ("linear", "ties", "dare_linear", "dare_ties"):
        refused = merging.ours(strategy, density=0.5)
        assert refused["error"] == "invalid"
        assert f"{strategy} needs equal ranks" in refused["reason"]
        assert "q_proj' has the ranks 4 and 6" in refused["reason"]


def test_values_that_overflow_are_named(merging: Merging) -> None:
    for strategy in ("cat", "linear"):
        refused = merging.ours(strategy, weights=[1e300, 1.0, 1.0])
        assert refused["error"] == "invalid"
        assert "is not finite" in refused["reason"]


def test_a_file_that_is_gone_or_changed_may_be_fetched_again(merging: Merging) -> None:
    path = merging.cache / merging.digests[1] / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert merging.ours("cat")["error"] == "unavailable"
    path.unlink()
    assert merging.ours("cat")["error"] == "unavailable"
