"""Draft tokens of models with recurrent layers: whatever is rejected, the output has the bits of one without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace_shard.batch.sequence_states import DraftedStates
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.states import StateLayer
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.multi_token import (
    FakeGrammars,
    Generation,
    PlannedProposer,
    Want,
    any_of,
)
from millrace_testing.engines.steps import Stepper, ints
from millrace_testing.models.models import VOCAB, prompt_of, read_model, save_tiny

CPU = torch.device("cpu")
MOST, NUM_TOKENS = 4, 24
WANTS = {
    0: Want(prompt_of(61), {}, 2),
    1: Want(prompt_of(30, seed=1), {"do_sample": True, "seed": 5, "temperature": 0.7}),
    2: Want(prompt_of(3, seed=2), {"repetition_penalty": 1.2}),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4},
    "lfm2": {"conv_bias": True},
    "nemotron_h": {},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_n_groups": 1},
    "kimi_linear": {},
    "falcon_mamba": {},
}
"""One of each kind of state, and attention beside one."""


@pytest.mark.parametrize(
    ("kernels", "dtype"), [("cpu", torch.bfloat16), ("plain", torch.float32)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_draft_tokens_change_no_bit(
    family: str, kernels: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **FAMILIES[family])
    kinds = make_kernels(kernels, deterministic=True)
    with torch.inference_mode():
        model = read_model(tmp_path, kinds, dtype=dtype)
    plain = Stepper(model, kinds, dtype=dtype)
    truth = {
        slot: Generation(plain, {slot: want}, NUM_TOKENS).yielded[slot]
        for slot, want in WANTS.items()
    }
    futures = {slot: [*want.prompt, *truth[slot].ids] for slot, want in WANTS.items()}
    random, stepper = (
        np.random.default_rng(5),
        Stepper(model, kinds, dtype=dtype, max_draft_tokens=MOST),
    )
    for error_rate in (1.0, 0.3, 0.0):
        stepper.use(PlannedProposer(futures, error_rate=error_rate))
        run = Generation(
            stepper,
            WANTS,
            NUM_TOKENS,
            allow=lambda _: (int(random.integers(1, 7)), int(random.integers(0, 6))),
            chunk=7,
            depth=2,
        )
        assert run.yielded == {
            slot: type(each)(each.ids, each.bits, each.tops, run.yielded[slot].computed)
            for slot, each in truth.items()
        }
        assert run.drafted > 20
        assert (run.accepted > 0) == (error_rate < 1)


def test_forced_tokens_before_draft_tokens_change_no_bit(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_next", **FAMILIES["qwen3_next"])
    kernels = make_kernels("cpu", deterministic=True)
    with torch.inference_mode():
        model = read_model(tmp_path, kernels, dtype=torch.float32)
    want = Want(prompt_of(19), grammar=any_of(None, None, [11], [4], [150], [7], None))

    def run(most: int, rows: tuple[int, int]) -> Generation:
        grammars = FakeGrammars(VOCAB).as_manager()
        stepper = Stepper(
            model, kernels, dtype=torch.float32, grammars=grammars, max_draft_tokens=most
        )
        if most:
            stepper.use(PlannedProposer({0: [*want.prompt, *ids]}, error_rate=0.4))
        return Generation(stepper, {0: want}, 16, allow=lambda _: rows)

    ids = list[int]()
    alone = run(0, (1, 0)).yielded[0]
    ids = alone.ids
    drafted = run(MOST, (6, 4))
    assert (drafted.yielded[0].ids, drafted.yielded[0].bits) == (alone.ids, alone.bits)
    assert drafted.drafted > 0


def test_second_pages_come_back_and_tokens_that_were_never_drafted_are_refused() -> None:
    layer = StateLayer(2, 8, (1, 4, 4)).new(6, torch.float32, CPU)
    drafted = DraftedStates(4, (layer,), range(4, 6), MOST)
    for _ in range(3):
        drafted.admit(0, 10)
        drafted.admit(3, 0)
        assert sorted(drafted.exchange(ints([0, 3]), ints([1, 2]))) == [4, 5]
        drafted.drop(ints([0, 2, 3]))
    drafted.admit(0, 10)
    drafted.advance(ints([0]), ints([11]), ints([3]))
    assert drafted.earlier(ints([0]), ints([13])).tolist() == [2]
    for start in (10, 15):
        with pytest.raises(StepInvalid, match="does not go on after its accepted draft tokens"):
            drafted.earlier(ints([0]), ints([start]))
