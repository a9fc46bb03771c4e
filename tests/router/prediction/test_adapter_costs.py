"""The cost of adapters is learned apart from the cost of steps, which it does not change."""

from __future__ import annotations

from random import Random

import pytest

from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.step_load import StepLoad

BASE = dict(zip(COEFFICIENTS, (0.01, 0.0005, 1e-7, 0.001, 0.0004, 1e-8), strict=True))
TRUTH = BASE | {"adapter_byte": 3e-11, "adapter_slice": 2e-8}


def random_load(random: Random, *, num_adapters: int | None = None) -> StepLoad:
    decodes = random.randint(1, 32)
    number = random.randint(0, decodes) if num_adapters is None else min(num_adapters, decodes)
    prompt = random.choice([0, 0, 0, 200])
    return StepLoad(
        decodes=decodes,
        context=decodes * random.randint(10, 500),
        prefill_tokens=prompt,
        prefill_pairs=prompt * 100,
        num_chunks=int(prompt > 0),
        adapter_bytes=number * random.choice([1, 5]) * 2_000_000,
        adapter_slices=number and 210 * random.randint(number, decodes),
    )


def learned(*, share: float) -> CostModel:
    """A model that observed steps, of which `share` have adapters."""
    truth, model, random = CostModel.fixed(TRUTH), CostModel(), Random(1)
    for number in range(3000):
        has_adapters = number > 100 and random.random() < share
        load = random_load(random, num_adapters=None if has_adapters else 0)
        model.observe(load, (truth.seconds(load) or 0.0) * random.uniform(0.95, 1.05))
    return model


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_steps_with_and_without_adapters_are_predicted(share: float) -> None:
    truth, model, random = CostModel.fixed(TRUTH), learned(share=share), Random(2)
    for num_adapters in (0, 1, 8, 32):
        for _ in range(50):
            load = random_load(random, num_adapters=num_adapters)
            assert model.seconds(load) == pytest.approx(truth.seconds(load), rel=0.12)


def test_a_model_without_adapters_says_nothing_of_them() -> None:
    assert set(learned(share=0.0).to_json()) & {"adapter_byte", "adapter_slice"} == set()
    again = CostModel.from_json(learned(share=0.5).to_json())
    load = StepLoad(decodes=8, context=800, adapter_bytes=40_000_000, adapter_slices=1680)
    plain = StepLoad(decodes=8, context=800)
    assert (again.seconds(load) or 0.0) > (again.seconds(plain) or 0.0)
