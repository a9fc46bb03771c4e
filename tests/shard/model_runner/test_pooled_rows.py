"""Hidden states and logits of prompts' last tokens equal transformers', in any chunks, among any other rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from millrace_proto.sequence import Pooling
from millrace_shard.batch.step import BatchChange, Forward, StepResult
from millrace_shard.errors import StepInvalid, UnsupportedModel, WeightsError
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.transformers_backend.supported import SUPPORTED
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.engines.steps import Stepper, after_prompt, beside, ints
from millrace_testing.models.models import VOCAB, edit_json, prompt_of, read_model, save_tiny

CPU = torch.device("cpu")
PROMPT = prompt_of(80, seed=5)
CUTS = [[80], [1, 79], [33, 33, 14], [7] * 11 + [3]]
TOLERANCE = 1e-4
IDS = (9, 4, 190)


def stepper(folder: Path, *, kernels: str = "plain", dtype: torch.dtype = torch.float32) -> Stepper:
    torch.set_num_threads(1)
    made = make_kernels(kernels, deterministic=True)
    model = read_model(folder, made, dtype=dtype)
    return Stepper(model, made, dtype=dtype)


def pooled(
    runner: Stepper, cuts: list[int], pooling: Pooling, *, others: bool = False
) -> list[float]:
    """What the prompt in slot 3 yields, in chunks of these lengths; rows of all kinds may share a step with them."""
    first = replace(runner.admission(3, PROMPT, pooling=pooling), chunk_tokens=ints(cuts[:1]))
    steps = [first, *(Forward(chunk_slots=ints([3]), chunk_tokens=ints([n])) for n in cuts[1:])]
    if others:
        runner.run(runner.admission(7, prompt_of(5, seed=9)))
        steps = [_beside(step, runner, number) for number, step in enumerate(steps)]
    results = [runner.run(step) for step in steps]
    assert all(3 not in result.pooled_slots for result in results[:-1])
    assert all(3 not in result.slots for result in results)
    return values_of(results[-1], 3)


def values_of(result: StepResult, slot: int) -> list[float]:
    place = result.pooled_slots.tolist().index(slot)
    end = int(result.pooled_counts[: place + 1].sum())
    return [float(value) for value in result.pooled_values[end - result.pooled_counts[place] : end]]


def _beside(step: Forward, runner: Stepper, number: int) -> Forward:
    """`step` with a decode, and after another prompt, embedded, scored or continued, that leaves with the next."""
    pooling = (Pooling(), Pooling((1, 2)), None)[number % 3]
    other = runner.admission(5, prompt_of(9, seed=number), pooling=pooling)
    return beside(after_prompt(step, other, dropped=[5] if number else []), [7])


@pytest.mark.parametrize("name", [*FAMILIES, *SUPPORTED])
def test_states_and_logits_match_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, name)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        decoder = reference.get_decoder()
        # Llama 4's class names itself.
        decoder = reference.model if decoder is reference else decoder
        states = decoder(ids).last_hidden_state[0, -1]
        logits = reference(ids).logits[0, -1, list(IDS)]
    runner = stepper(tmp_path)
    result = torch.tensor(pooled(runner, [33, 47], Pooling()))
    torch.testing.assert_close(result, states, atol=TOLERANCE, rtol=0)
    scored = torch.tensor(pooled(stepper(tmp_path), [80], Pooling(IDS)))
    torch.testing.assert_close(scored, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pooling", [Pooling(), Pooling(IDS)], ids=["state", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_bits_depend_neither_on_chunks_nor_on_the_batch(
    kernels: str, dtype: torch.dtype, pooling: Pooling, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "qwen3")
    result = [
        pooled(stepper(tmp_path, kernels=kernels, dtype=dtype), cuts, pooling, others=others)
        for cuts, others in ((CUTS[0], False), (CUTS[1], True), (CUTS[2], True), (CUTS[3], True))
    ]
    assert result[1:] == result[:1] * 3


def test_pooled_rows_do_not_change_other_rows_of_the_step(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    alone, together = stepper(tmp_path), stepper(tmp_path)
    expected = alone.run(alone.admission(0, prompt_of(20))), alone.decode([0])
    first = together.admission(0, prompt_of(20))
    beside = together.admission(1, PROMPT, pooling=Pooling())
    both = replace(
        first,
        change=BatchChange(
            admitted=(*beside.change.admitted, *first.change.admitted),
            grown_slots=np.concatenate([beside.change.grown_slots, first.change.grown_slots]),
            grown_blocks=np.concatenate([beside.change.grown_blocks, first.change.grown_blocks]),
        ),
        chunk_slots=ints([1, 0]),
        chunk_tokens=ints([80, 20]),
    )
    result = together.run(both), together.decode([0])
    assert result[0].slots.tolist() == [0]
    for one, other in zip(result, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def test_no_logits_exist_for_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "qwen3")
    runner = stepper(tmp_path)
    sizes: list[int] = []
    logits = runner.runner._model.logits

    def counted(states: Tensor, adapters: Any = None) -> Tensor:
        sizes.append(len(states))
        return logits(states, adapters)

    monkeypatch.setattr(runner.runner._model, "logits", counted)
    runner.run(runner.admission(0, PROMPT, pooling=Pooling()))
    assert sizes == [0]
    runner.run(runner.admission(1, PROMPT, pooling=Pooling(IDS)))
    assert sizes == [0, 0, 1]


@pytest.mark.parametrize("pooling", [Pooling(), Pooling(IDS)], ids=["state", "logits"])
def test_a_row_that_is_not_finite_fails_no_other_row(pooling: Pooling, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    model.save_pretrained(tmp_path)
    runner = stepper(tmp_path)
    bad = runner.admission(0, [5, 7, 6], pooling=pooling)
    good = runner.admission(1, [5, 8, 6], pooling=pooling)
    result = runner.run(
        replace(
            bad,
            change=BatchChange(
                admitted=(*bad.change.admitted, *good.change.admitted),
                grown_slots=np.concatenate([bad.change.grown_slots, good.change.grown_slots]),
                grown_blocks=np.concatenate([bad.change.grown_blocks, good.change.grown_blocks]),
            ),
            chunk_slots=ints([0, 1]),
            chunk_tokens=ints([3, 3]),
        )
    )
    assert result.failed_slots.tolist() == [0]
    assert result.pooled_slots.tolist() == [1]
    assert np.isfinite(result.pooled_values).all()


def test_steps_that_contradict_a_pooled_sequence_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    runner = stepper(tmp_path)
    runner.run(runner.admission(0, PROMPT, pooling=Pooling()))
    with pytest.raises(StepInvalid, match="yields no token"):
        runner.decode([0])
    result = runner.run(runner.admission(1, PROMPT, pooling=Pooling((VOCAB,))))
    assert result.failed_slots.tolist() == [1]
    assert not len(result.pooled_slots)
    # The slot of a sequence that was pooled is as good as any.
    runner.run(Forward(change=BatchChange(dropped_slots=ints([0]))))
    assert runner.run(runner.admission(0, PROMPT)).slots.tolist() == [0]


def embedding_checkpoint(folder: Path) -> Any:
    """A checkpoint as Qwen3-Embedding's: of the class without a head, by its names, and untied."""
    save_tiny(folder, "qwen3", tie_word_embeddings=False)
    model = AutoModel.from_pretrained(folder)
    model.save_pretrained(folder)
    return model.eval()


def test_a_checkpoint_without_a_head_has_states(tmp_path: Path) -> None:
    model = embedding_checkpoint(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    runner = stepper(tmp_path)
    assert runner.runner._model.info.headless
    result = torch.tensor(pooled(runner, [33, 47], Pooling()))
    torch.testing.assert_close(result, expected, atol=TOLERANCE, rtol=0)


def test_a_head_may_be_missing_only_from_a_model_for_embeddings(tmp_path: Path) -> None:
    embedding_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        stepper(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert stepper(tmp_path).runner._model.info.headless


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    embedding_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", is_causal=False)
    with pytest.raises(UnsupportedModel, match="is_causal"):
        stepper(tmp_path)
