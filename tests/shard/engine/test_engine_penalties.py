"""The engine penalises by counts on the device as by whole sequences, whatever sequences its slots had before."""

from __future__ import annotations

import pytest

from millrace_proto.sampling import Sampling
from millrace_shard.kernels.scores import SamplingKernels
from millrace_testing.engines.engine_driver import PROMPT, Driver, forward, generate, tokens

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda.operators import TritonSampling

KIND = Sampling(repetition_penalty=1.4, frequency_penalty=2.0, presence_penalty=0.7)


def generated(sampling: SamplingKernels | None) -> list[list[int]]:
    """Tokens of sequences that take over slots from each other, within an epoch and after its end."""
    driver = Driver(sampling=sampling)
    driver.warm_up()
    driver.open()
    runs = [generate(driver, 0, 6, parameters=KIND)]
    runs.append(generate(driver, 0, 6, ids=list(range(1, 15)), parameters=KIND))
    driver.run(forward(driver.admit(0, parameters=KIND), chunks=[(0, len(PROMPT))]))
    driver.open()
    later = list(range(30, 40))
    admitted = driver.admit(0, later, parameters=KIND), driver.admit(3, parameters=KIND)
    results = [driver.run(forward(*admitted, chunks=[(0, len(later)), (3, len(PROMPT))]))]
    results += [driver.run(forward(decodes=[0, 3])) for _ in range(4)]
    driver.engine.close()
    return runs + [[tokens(result)[slot] for result in results] for slot in (0, 3)]


def test_counts_follow_the_sequences_of_slots() -> None:
    expected = generated(None)
    assert generated(TritonSampling()) == expected
    assert expected[3] == expected[0][:5]
