"""Draft models and Medusa heads propose the right drafts, which change no token."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.loading import Speculation, SpeculationLoader
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.multi_token import (
    FakeGrammars,
    Generation,
    RankJob,
    Want,
    Yielded,
    any_of,
    speculate_on_a_rank,
)
from millrace_testing.engines.steps import Stepper, ints
from millrace_testing.models.models import VOCAB, greedy, prompt_of, read_model, save_tiny
from millrace_testing.shards.ranks import run_ranks

CPU = torch.device("cpu")
MOST = 4
NUM_TOKENS = 24
BLOCK_SIZE = 8
SEEDED = {"do_sample": True, "seed": 5, "temperature": 0.7, "top_k": 30}
WANTS = {
    0: Want(prompt_of(19)),
    1: Want(prompt_of(30, seed=1), SEEDED),
    2: Want(prompt_of(3, seed=2), {"repetition_penalty": 1.2}, 2),
}


@dataclass(frozen=True)
class Setup:
    """A model in a folder, transformers' own one, and what each want yields without drafts."""

    folder: Path
    reference: PreTrainedModel
    model: CausalModel
    kernels: Kernels
    truth: dict[int, Yielded]

    @property
    def loader(self) -> SpeculationLoader:
        return SpeculationLoader(
            folder=self.folder,
            dtype=torch.float32,
            kernels=self.kernels,
            group=ProcessGroup.single(),
            device=CPU,
        )

    def load(self, draft: Path | None, speculate: int | None) -> tuple[CausalModel, Speculation]:
        with torch.inference_mode():
            model, speculation = self.loader.load(
                self.model, draft_folder=draft, max_draft_tokens=speculate
            )
        assert speculation is not None
        return model, speculation

    def stepper(self, draft: Path, speculate: int | None = MOST, **options: Any) -> Stepper:
        model, speculation = self.load(draft, speculate)
        return Stepper(model, self.kernels, dtype=torch.float32, speculation=speculation, **options)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("llama")
    reference = save_tiny(folder, "llama")
    kernels = PlainKernels(deterministic=True, block_size=BLOCK_SIZE)
    with torch.inference_mode():
        model = read_model(folder, kernels)
    stepper = Stepper(model, kernels, dtype=torch.float32)
    truth = {
        slot: Generation(stepper, {slot: want}, NUM_TOKENS).yielded[slot]
        for slot, want in WANTS.items()
    }
    return Setup(folder, reference, model, kernels, truth)


def nearly(setup: Setup, folder: Path, noise: float) -> Path:
    """The model with noise on its weights: right often, not always."""
    save_tiny(folder, "llama")
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: value + noise * torch.randn(value.shape, generator=generator)
        for name, value in setup.reference.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check(run: Generation, truth: dict[int, Yielded]) -> None:
    for slot, yielded in run.yielded.items():
        assert (yielded.ids, yielded.bits, yielded.tops) == (
            truth[slot].ids,
            truth[slot].bits,
            truth[slot].tops,
        )


@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_draft_model_that_errs_changes_no_bit(
    setup: Setup, depth: int, chunk: int, tmp_path: Path
) -> None:
    stepper = setup.stepper(nearly(setup, tmp_path, 0.01))
    random = np.random.default_rng(depth)
    run = Generation(
        stepper,
        WANTS,
        NUM_TOKENS,
        allow=lambda _: (int(random.integers(1, 7)), int(random.integers(0, 6))),
        chunk=chunk,
        depth=depth,
    )
    check(run, setup.truth)
    assert 0 < run.accepted < run.drafted


@pytest.mark.parametrize("chunk", [1000, 7])
def test_the_model_itself_as_draft_is_always_right(setup: Setup, chunk: int) -> None:
    """All drafts are right only if the draft model's KV is complete, after prompts in chunks and after drafts."""
    wants = {slot: Want(want.prompt) for slot, want in WANTS.items()}
    run = Generation(
        setup.stepper(setup.folder),
        wants,
        NUM_TOKENS,
        allow=lambda slot: (3 + slot, 2 + slot),
        chunk=chunk,
        depth=2,
    )
    for slot, want in wants.items():
        assert run.yielded[slot].ids == greedy(setup.reference, want.prompt, NUM_TOKENS)[0]
    assert run.accepted == run.drafted > 0


def test_a_draft_model_catches_up_after_plain_decodes(setup: Setup) -> None:
    """And after drafts that they have cut off."""
    calls = iter(range(1000))
    run = Generation(
        setup.stepper(setup.folder),
        {0: Want(WANTS[0].prompt)},
        NUM_TOKENS,
        allow=lambda _: (1 + MOST, MOST) if next(calls) % 4 == 3 else (1, 0),
    )
    check(run, {0: setup.truth[0]})
    assert run.accepted == run.drafted > MOST


def test_rejected_drafts_leave_nothing_in_the_draft_model(setup: Setup) -> None:
    """After each step with rejected drafts, the next ones are right again."""
    stepper = setup.stepper(setup.folder)
    run = Generation(
        stepper,
        {1: Want(WANTS[1].prompt, {"do_sample": True, "seed": 11, "temperature": 3.0})},
        NUM_TOKENS,
        allow=lambda _: (1 + MOST, MOST),
    )
    assert run.accepted < run.drafted
    proposer = stepper.runner._proposer
    assert proposer is not None
    again = Generation(
        stepper, {1: Want(WANTS[1].prompt)}, NUM_TOKENS, allow=lambda _: (1 + MOST, MOST)
    )
    assert again.accepted == again.drafted > 0


def test_a_draft_model_reads_blocks_that_another_sequence_filled(setup: Setup) -> None:
    stepper = setup.stepper(setup.folder)
    prompt = prompt_of(2 * BLOCK_SIZE + 3, seed=8)
    stepper.run(stepper.admission(0, prompt))
    shared = stepper.batch.blocks.of(0)[:2].tolist()
    own = [stepper.free.pop(0) for _ in range(4)]
    sequence = Sequence(
        slot=1,
        request_id=1,
        input_ids=ints(prompt),
        cached_tokens=2 * BLOCK_SIZE,
        parameters=Sampling(),
    )
    change = BatchChange(
        admitted=(sequence,), grown_slots=ints([1] * 6), grown_blocks=ints([*shared, *own])
    )
    first = stepper.run(Forward(change=change, chunk_slots=ints([1]), chunk_tokens=ints([3])))
    multi_token = Forward(decode_slots=ints([1]), decode_tokens=ints([5]), draft_tokens=ints([4]))
    ids = (
        first.ids.tolist()
        + stepper.run(multi_token).ids.tolist()
        + stepper.run(multi_token).ids.tolist()
    )
    assert ids == greedy(setup.reference, prompt, 11)[0]


def test_a_draft_model_with_fewer_positions_stops_drafting(setup: Setup, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_position_embeddings=26)
    run = Generation(
        setup.stepper(tmp_path),
        {0: Want(WANTS[0].prompt), 1: Want(WANTS[1].prompt, SEEDED)},
        NUM_TOKENS,
        allow=lambda _: (1 + MOST, MOST),
    )
    check(run, setup.truth)
    assert 0 < run.drafted <= 26 - len(WANTS[0].prompt)


def test_a_draft_model_continues_after_forced_tokens(setup: Setup) -> None:
    grammars = FakeGrammars(VOCAB)
    grammar = any_of(None, None, [11], [4], [150], [7], None)
    stepper = setup.stepper(setup.folder, grammars=grammars.as_manager())
    run = Generation(
        stepper, {0: Want(WANTS[0].prompt, grammar=grammar)}, 18, allow=lambda _: (5, 4)
    )
    ids = run.yielded[0].ids
    assert ids[2:6] == [11, 4, 150, 7]
    rest = greedy(setup.reference, [*WANTS[0].prompt, *ids[:6]], 12)[0]
    assert ids[6:] == rest
    assert run.drafted - run.accepted < MOST, (
        "it errs where the grammar does not let the model have its way, once"
    )
    assert run.accepted > MOST


def test_a_smaller_table_of_the_same_tokens_will_do(setup: Setup, tmp_path: Path) -> None:
    """Ids that it does not know are read as its last one."""
    save_tiny(tmp_path, "llama", vocab_size=VOCAB - 9)
    for folder in (tmp_path, setup.folder):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    try:
        run = Generation(
            setup.stepper(tmp_path), WANTS, NUM_TOKENS, allow=lambda _: (1 + MOST, MOST), depth=2
        )
    finally:
        (setup.folder / "tokenizer.json").unlink()
    check(run, setup.truth)
    assert run.drafted


def test_a_draft_model_of_other_tokens_is_refused(setup: Setup, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", vocab_size=VOCAB - 9)
    with pytest.raises(UnsupportedModel, match="190 token ids, the model 199"):
        setup.load(tmp_path, MOST)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (setup.folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    try:
        with pytest.raises(UnsupportedModel, match="has other tokens"):
            setup.load(tmp_path, MOST)
    finally:
        (setup.folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("draft", "speculate", "most"),
    [(False, 3, 3), (True, None, 4), (True, 7, 7), (True, 0, None), (False, None, None)],
)
def test_the_number_of_drafts_follows_the_flag_and_the_draft_model(
    setup: Setup, draft: bool, speculate: int | None, most: int | None
) -> None:
    folder = setup.folder if draft else None
    with torch.inference_mode():
        _, speculation = setup.loader.load(
            setup.model, draft_folder=folder, max_draft_tokens=speculate
        )
    assert (speculation and speculation.max_draft_tokens) == most
    has_draft = speculation is not None and speculation.draft is not None
    assert has_draft == (draft and most is not None)


class Heads:
    """Random residual blocks, and output heads that are fitted to what the model yields after given prompts."""

    def __init__(self, setup: Setup, prompts: list[list[int]], num_heads: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = setup.reference.config.hidden_size
        self._reference = setup.reference
        self.tensors: dict[str, Tensor] = {}
        for head in range(num_heads):
            linear = torch.randn(hidden, hidden, generator=generator) * 0.1
            bias = torch.randn(hidden, generator=generator) * 0.1
            self.tensors[f"{head}.0.linear.weight"] = linear
            self.tensors[f"{head}.0.linear.bias"] = bias
            features, targets = [], []
            for prompt in prompts:
                whole = prompt + greedy(setup.reference, prompt, NUM_TOKENS)[0]
                # The state at p predicts p + 1 by the model's own head, and so on.
                places = range(len(prompt) - 1, len(whole) - 2 - head)
                features.append(self._features(whole, head)[list(places)])
                targets += [whole[p + 2 + head] for p in places]
            x, y = torch.cat(features), F.one_hot(torch.tensor(targets), VOCAB).float()
            self.tensors[f"{head}.1.weight"] = torch.linalg.lstsq(x, y).solution.T.contiguous()
        self.num_heads = num_heads

    def _features(self, ids: list[int], head: int) -> Tensor:
        with torch.no_grad():
            states: Tensor = self._reference.model(torch.tensor([ids])).last_hidden_state[0]
        linear = self.tensors[f"{head}.0.linear.weight"]
        return states + F.silu(states @ linear.T + self.tensors[f"{head}.0.linear.bias"])

    def draft(self, ids: list[int], most: int) -> list[int]:
        """The drafts of the heads after `ids`, whose last token's KV is not computed."""
        return [
            int((self._features(ids[:-1], head)[-1] @ self.tensors[f"{head}.1.weight"].T).argmax())
            for head in range(most)
        ]

    def save(self, folder: Path, prefix: str = "", **config: Any) -> Path:
        tensors = {prefix + name: value for name, value in self.tensors.items()}
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        fields = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": 1,
            "base_model_name_or_path": "org/base",
        }
        (folder / "config.json").write_text(json.dumps(fields | config))
        return folder


@pytest.fixture(scope="module")
def heads(setup: Setup) -> Heads:
    return Heads(setup, [list(WANTS[0].prompt), list(WANTS[2].prompt)])


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads_draft_the_tokens_that_they_were_fitted_to(
    setup: Setup, heads: Heads, prefix: str, tmp_path: Path
) -> None:
    stepper = setup.stepper(heads.save(tmp_path, prefix), None)
    wants = {slot: Want(WANTS[slot].prompt) for slot in (0, 2)}
    run = Generation(stepper, wants, NUM_TOKENS, allow=lambda _: (9, 9), chunk=5, depth=2)
    for slot, want in wants.items():
        assert run.yielded[slot].ids == greedy(setup.reference, want.prompt, NUM_TOKENS)[0]
    assert run.accepted >= 0.7 * run.drafted > 0
    assert run.steps < NUM_TOKENS


@pytest.mark.parametrize(("depth", "by_pieces"), [(1, False), (2, False), (2, True)])
def test_medusa_heads_change_no_bit_and_read_the_right_state(
    setup: Setup,
    heads: Heads,
    depth: int,
    by_pieces: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    pieces = GraphSettings(None, recorder.new_capture) if by_pieces else None
    stepper = setup.stepper(heads.save(tmp_path), None, pieces=pieces)
    proposer = stepper.runner._proposer
    assert proposer is not None
    propose, drafts = proposer.propose, []

    def recorded(rows: Any) -> Any:
        result = propose(rows)
        for row, slot in enumerate(rows.slots.tolist()):
            if result.counts[row]:
                drafts.append((slot, int(rows.num_tokens[row]), result.of_row(row)))
        return result

    monkeypatch.setattr(proposer, "propose", recorded)
    random = np.random.default_rng(depth)
    run = Generation(
        stepper,
        WANTS,
        NUM_TOKENS,
        allow=lambda _: (int(random.integers(1, 5)), int(random.integers(0, 4))),
        chunk=7,
        depth=depth,
    )
    check(run, setup.truth)
    assert 0 < run.accepted < run.drafted
    assert bool(recorder.replays()) == by_pieces
    assert drafts
    for slot, length, forced in drafts:
        whole = [*WANTS[slot].prompt, *setup.truth[slot].ids]
        if length <= len(whole):
            assert list(forced) == heads.draft(whole[:length], len(forced))


def test_medusa_heads_are_silent_after_forced_tokens(
    setup: Setup, heads: Heads, tmp_path: Path
) -> None:
    """Their state is older than the last token then; they go on as soon as there is a new one."""
    grammars = FakeGrammars(VOCAB)
    grammar = any_of(None, None, [11], [4], [150], None)
    stepper = setup.stepper(heads.save(tmp_path), None, grammars=grammars.as_manager())
    run = Generation(
        stepper, {0: Want(WANTS[0].prompt, grammar=grammar)}, 14, allow=lambda _: (4, 3)
    )
    ids = run.yielded[0].ids
    assert ids[2:5] == [11, 4, 150]
    assert ids[5:] == greedy(setup.reference, [*WANTS[0].prompt, *ids[:5]], 9)[0]
    assert run.drafted


def test_prompts_are_scored_in_steps_with_drafts_of_medusa_heads(
    setup: Setup, heads: Heads, tmp_path: Path
) -> None:
    """Such a step runs in two parts and leaves the heads no state for drafts; the next step does."""
    stepper = setup.stepper(heads.save(tmp_path), None)
    drafting = Forward(decode_slots=ints([0]), decode_tokens=ints([4]), draft_tokens=ints([3]))
    scored = stepper.admission(
        1, WANTS[1].prompt, prefill_logprobs=True, prefill_top_n_tokens=2, **SEEDED
    )
    steps = [
        stepper.admission(0, WANTS[0].prompt),
        drafting,
        replace(drafting, change=scored.change, chunk_slots=ints([1]), chunk_tokens=ints([30])),
        *[drafting] * 3,
    ]
    results = [stepper.run(step) for step in steps]
    ids = [id_ for result in results for id_ in result.ids[result.slots.repeat(result.counts) == 0]]
    assert ids == setup.truth[0].ids[: len(ids)]
    drafted = [int(result.drafted_tokens.sum()) for result in results[1:]]
    assert drafted[0] > 0
    assert drafted[2] == 0
    assert drafted[3] > 0
    alone = Stepper(setup.model, setup.kernels, dtype=torch.float32)
    expected = alone.run(
        alone.admission(1, WANTS[1].prompt, prefill_logprobs=True, prefill_top_n_tokens=2)
    )
    assert results[2].prefill_logprobs[1:].tolist() == expected.prefill_logprobs[1:].tolist()
    assert results[2].prefill_top_ids.tolist() == expected.prefill_top_ids.tolist()


def test_more_drafts_than_heads_are_refused(setup: Setup, heads: Heads, tmp_path: Path) -> None:
    folder = heads.save(tmp_path)
    assert setup.load(folder, None)[1].max_draft_tokens == 3
    assert setup.load(folder, 2)[1].max_draft_tokens == 2
    with pytest.raises(UnsupportedModel, match="--speculate 4, but there are 3 Medusa heads"):
        setup.load(folder, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_heads": 0}, "positive integers"),
        ({"medusa_num_layers": "2"}, "positive integers"),
        ({"base_model_name_or_path": None}, "no base_model_name_or_path"),
        ({"medusa_num_layers": 2}, "0.1.linear.weight is missing"),
    ],
)
def test_medusa_heads_that_cannot_be_used_are_refused(
    setup: Setup, heads: Heads, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        setup.load(heads.save(tmp_path, **config), None)


def test_medusa_heads_in_a_pickle_are_refused(setup: Setup, heads: Heads, tmp_path: Path) -> None:
    heads.save(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedModel, match="may run code when read"):
        setup.load(tmp_path, None)


def test_two_ranks_draft_and_score_alike_and_yield_the_tokens_of_one(
    setup: Setup, heads: Heads, tmp_path: Path
) -> None:
    prompts = [list(WANTS[slot].prompt) for slot in (0, 2)]
    drafts = (None, setup.folder, heads.save(tmp_path))
    jobs = [RankJob(setup.folder, draft, prompts, NUM_TOKENS) for draft in drafts]
    first, second = run_ranks(tmp_path, 2, speculate_on_a_rank, jobs)
    assert first == second
    drafted, (logprobs, best) = first
    for yielded, _, _ in drafted:
        for slot, prompt in enumerate(prompts):
            assert yielded[slot].ids == greedy(setup.reference, prompt, NUM_TOKENS)[0]
    _, (_, drafted, accepted), (_, drafted_by_heads, accepted_of_heads) = drafted
    assert accepted == drafted > 0
    assert accepted_of_heads >= 0.7 * drafted_by_heads > 0
    with torch.no_grad():
        expected = setup.reference(torch.tensor(prompts[:1])).logits[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(prompts[0][1:])[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), chosen, atol=2e-5, rtol=0)
    assert best == expected.argmax(-1).tolist()
