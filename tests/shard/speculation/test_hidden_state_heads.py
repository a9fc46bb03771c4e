"""EAGLE, EAGLE-3 and MTP heads draft by the formulas of their papers, and change no bit of the output."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_runner import draft_graphs, piecewise_layers
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.checkpoints import MTP
from millrace_shard.speculation.head_spec import read_head
from millrace_shard.speculation.hidden_state_heads import HeadProposer
from millrace_shard.speculation.loading import Speculation, SpeculationLoader
from millrace_shard.speculation.proposer import AcceptanceCheck
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.kernels import make_kernels
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
from millrace_testing.models.eagle_heads import EagleHead
from millrace_testing.models.models import (
    VOCAB,
    edit_json,
    greedy,
    prompt_of,
    read_model,
    save_tiny,
)
from millrace_testing.shards.ranks import run_ranks

CPU = torch.device("cpu")
MOST, NUM_TOKENS = 4, 24
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
    kernels: Kernels
    dtype: torch.dtype
    truth: dict[int, Yielded]

    def stepper(self, head: Path, **options: Any) -> Stepper:
        model, speculation = self.load(head)
        return Stepper(model, self.kernels, dtype=self.dtype, speculation=speculation, **options)

    def load(self, head: Path) -> tuple[CausalModel, Speculation]:
        with torch.inference_mode():
            model = read_model(self.folder, self.kernels, dtype=self.dtype)
            loader = SpeculationLoader(
                folder=self.folder,
                dtype=self.dtype,
                kernels=self.kernels,
                group=ProcessGroup.single(),
                device=CPU,
            )
            model, speculation = loader.load(model, draft_folder=head, max_draft_tokens=MOST)
        assert speculation is not None
        return model, speculation


def setup_of(
    folder: Path, kind: str, kernels: Kernels, dtype: torch.dtype, **overrides: Any
) -> Setup:
    reference = save_tiny(folder, kind, **overrides)
    with torch.inference_mode():
        model = read_model(folder, kernels, dtype=dtype)
    stepper = Stepper(model, kernels, dtype=dtype)
    truth = {
        slot: Generation(stepper, {slot: want}, NUM_TOKENS).yielded[slot]
        for slot, want in WANTS.items()
    }
    return Setup(folder, reference, kernels, dtype, truth)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("llama")
    kernels = make_kernels("plain", deterministic=True, block_size=8)
    return setup_of(folder, "llama", kernels, torch.float32, num_hidden_layers=4)


KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"is_third": False},
    "eagle with a bias": {"is_third": False, "bias": True},
    "eagle3": {"is_third": True, "draft_vocab": 120},
    "eagle3 of the whole vocabulary": {"is_third": True},
    "eagle3 with another residual": {
        "is_third": True,
        "draft_vocab": 120,
        "norm_before_residual": True,
    },
}


def check(run: Generation, truth: dict[int, Yielded]) -> None:
    for slot, yielded in run.yielded.items():
        assert (yielded.ids, yielded.bits, yielded.tops) == (
            truth[slot].ids,
            truth[slot].bits,
            truth[slot].tops,
        )


def proposer_of(stepper: Stepper) -> HeadProposer:
    proposer = stepper.runner._proposer
    assert isinstance(proposer, HeadProposer)
    return proposer


def record(stepper: Stepper, patch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Slot, length and draft tokens of each row that drafts from now on."""
    proposer, drafts = proposer_of(stepper), list[tuple[int, int, tuple[int, ...]]]()
    propose = proposer.propose

    def recorded(rows: Any) -> Any:
        result = propose(rows)
        for row, slot in enumerate(rows.slots.tolist()):
            if result.counts[row]:
                drafts.append((slot, int(rows.num_tokens[row]), result.of_row(row)))
        return result

    patch.setattr(proposer, "propose", recorded)
    return drafts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "chunk"), [(1, 1000), (2, 7)])
def test_heads_draft_by_their_formula_and_change_no_bit(
    setup: Setup,
    kind: str,
    depth: int,
    chunk: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = EagleHead(setup.reference, **KINDS[kind])
    stepper = setup.stepper(head.save(tmp_path))
    drafts = record(stepper, monkeypatch)
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
    assert len(drafts) > 20
    for slot, length, ids in drafts:
        whole = [*WANTS[slot].prompt, *setup.truth[slot].ids][:length]
        assert list(ids) == [token for token, _ in head.draft(whole, len(ids))]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_graphs_leave_the_states_that_heads_draft_from(
    setup: Setup, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piecewise_layers, "TOKEN_COUNTS", (16, 8))
    # These kernels take the lengths of decodes from the device.
    setup = replace(setup, kernels=make_kernels("plain", deterministic=False, block_size=8))
    head = EagleHead(setup.reference, **KINDS[kind]).save(tmp_path)
    graphs, pieces = Recorder(), Recorder()
    captured = setup.stepper(
        head,
        graphs=GraphSettings(None, graphs.new_capture),
        pieces=GraphSettings(None, pieces.new_capture),
    )
    drafts = []
    for stepper in (captured, setup.stepper(head)):
        drafts.append(record(stepper, monkeypatch))
        random = np.random.default_rng(1)
        choices = [(1, 0), (1, 0), (1, 0), (5, 4)]
        allow = partial(_any_of, choices, random)
        run = Generation(stepper, WANTS, NUM_TOKENS, allow=allow, chunk=7)
        ids = {slot: yielded.ids for slot, yielded in run.yielded.items()}
        assert ids == {slot: yielded.ids for slot, yielded in setup.truth.items()}
    assert drafts[0] == drafts[1] != []
    assert sum(graphs.replays().values()) > 5
    assert sum(pieces.replays().values()) > 5


def _any_of(choices: list[tuple[int, int]], random: np.random.Generator, _: int) -> tuple[int, int]:
    return choices[int(random.integers(len(choices)))]


class Fitted(EagleHead):
    """An EAGLE-3 head whose output head is fitted to what the target yields after given prompts."""

    def fit(self, prompts: list[list[int]]) -> None:
        features, targets = list[Tensor](), list[int]()
        for prompt in prompts:
            whole = prompt + greedy(self.target, prompt, NUM_TOKENS)[0]
            states = self.inputs(whole)
            for end in range(len(prompt) + 1, len(whole) - 1):
                known, tokens = states[: end - 1], whole[1:end]
                for ahead in range(min(3, len(whole) - end)):
                    result = self.results(known, tokens)[-1]
                    features.append(self.features(result))
                    targets.append(whole[end + ahead])
                    known, tokens = torch.cat([known, result[None]]), [*tokens, targets[-1]]
        x, y = torch.stack(features), F.one_hot(torch.tensor(targets), VOCAB).float()
        self.tensors["lm_head.weight"] = torch.linalg.lstsq(x, y).solution.T.contiguous()


@pytest.fixture(scope="module")
def fitted(setup: Setup) -> Fitted:
    head = Fitted(setup.reference, is_third=True)
    head.fit([list(WANTS[0].prompt)])
    return head


def test_a_head_that_knows_the_model_is_right_and_saves_steps(
    setup: Setup, fitted: Fitted, tmp_path: Path
) -> None:
    run = Generation(
        setup.stepper(fitted.save(tmp_path)),
        {0: Want(WANTS[0].prompt)},
        NUM_TOKENS,
        allow=lambda _: (4, 3),
        depth=2,
        chunk=5,
    )
    check(run, {0: setup.truth[0]})
    assert run.accepted >= 0.7 * run.drafted > 0
    assert run.steps < NUM_TOKENS


def test_a_head_drafts_behind_blocks_that_another_sequence_filled(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = EagleHead(setup.reference, is_third=True)
    stepper = setup.stepper(head.save(tmp_path))
    prompt = prompt_of(2 * stepper.block_size + 3, seed=8)
    stepper.run(stepper.admission(0, prompt))
    shared = stepper.batch.blocks.of(0)[:2].tolist()
    own = [stepper.free.pop(0) for _ in range(4)]
    cached = 2 * stepper.block_size
    sequence = Sequence(
        slot=1,
        request_id=1,
        input_ids=ints(prompt),
        cached_tokens=cached,
        parameters=Sampling(),
    )
    change = BatchChange(
        admitted=(sequence,), grown_slots=ints([1] * 6), grown_blocks=ints([*shared, *own])
    )
    drafts = record(stepper, monkeypatch)
    first = stepper.run(Forward(change=change, chunk_slots=ints([1]), chunk_tokens=ints([3])))
    many = Forward(decode_slots=ints([1]), decode_tokens=ints([5]), draft_tokens=ints([4]))
    ids = first.ids.tolist()
    for _ in range(3):
        ids += stepper.run(many).ids.tolist()
    assert ids == greedy(setup.reference, prompt, len(ids))[0]
    assert next(length for _, length, _ in drafts) == len(prompt) + 1
    for _, length, guessed in drafts:
        whole = [*prompt, *ids][:length]
        assert list(guessed) == [token for token, _ in head.draft(whole, len(guessed))]


def test_a_head_drafts_again_after_forced_tokens(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = EagleHead(setup.reference, is_third=True)
    grammars = FakeGrammars(VOCAB)
    grammar = any_of(None, None, [11], [4], [150], [7], None)
    stepper = setup.stepper(head.save(tmp_path), grammars=grammars.as_manager())
    drafts = record(stepper, monkeypatch)
    want = Want(WANTS[0].prompt, grammar=grammar)
    run = Generation(stepper, {0: want}, 18, allow=lambda _: (5, 4))
    ids = run.yielded[0].ids
    assert ids[2:6] == [11, 4, 150, 7]
    assert ids[6:] == greedy(setup.reference, [*WANTS[0].prompt, *ids[:6]], 12)[0]
    later = [draft for draft in drafts if draft[1] > len(WANTS[0].prompt) + 6]
    assert later
    for _, length, guessed in later:
        whole = [*WANTS[0].prompt, *ids][:length]
        assert list(guessed) == [token for token, _ in head.draft(whole, len(guessed))]


class MtpHead:
    """The MTP layer of a checkpoint, by transformers' class: each call computes a whole sequence."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self._target = target
        config = target.config
        config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self._mtp = MtpModel(target, 1).eval()
        (layer,) = self._mtp.layers
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.15 if parameter.ndim > 1 else 1 + noise * 0.1)
        prefix, tensors = f"model.layers.{config.num_hidden_layers}.", {}
        for name, value in layer.state_dict().items():
            bare = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            tensors[prefix + bare] = value.contiguous()
        stored = load_file(folder / "model.safetensors") | tensors
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        edit_json(folder / "config.json", num_nextn_predict_layers=1, num_mtp_layers=None)

    def draft(self, ids: list[int], most: int) -> list[int]:
        """The chain of drafts after `ids`, whose last token the target has not computed."""
        with torch.no_grad():
            states = self._target.model(torch.tensor([ids[:-1]])).last_hidden_state
            tokens, drafts = list(ids[1:]), list[int]()
            for _ in range(most):
                result = self._mtp.forward_layer(
                    0,
                    states,
                    torch.arange(len(tokens))[None],
                    MtpCache(config=self._target.config.get_mtp_config()),
                    input_ids=torch.tensor([tokens]),
                )[:, -1:]
                drafts.append(int(self._target.lm_head(result)[0, -1].argmax()))
                states, tokens = torch.cat([states, result], dim=1), [*tokens, drafts[-1]]
        return drafts


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_mtp_layers_draft_as_in_transformers_and_change_no_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = make_kernels("plain", deterministic=True, block_size=8)
    setup = setup_of(tmp_path, kind, kernels, torch.float32)
    mtp = MtpHead(tmp_path, setup.reference)
    stepper = setup.stepper(MTP)
    drafts = record(stepper, monkeypatch)
    random = np.random.default_rng(2)
    run = Generation(
        stepper,
        WANTS,
        NUM_TOKENS,
        allow=lambda _: (int(random.integers(1, 5)), int(random.integers(0, 4))),
        chunk=7,
        depth=2,
    )
    check(run, setup.truth)
    assert len(drafts) > 20
    for slot, length, ids in drafts[:12]:
        whole = [*WANTS[slot].prompt, *setup.truth[slot].ids][:length]
        assert list(ids) == mtp.draft(whole, len(ids))


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite"])
def test_chains_of_mtp_layers_by_graphs_draft_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = make_kernels("cpu", deterministic=True)
    setup = setup_of(tmp_path, kind, kernels, torch.float32)
    MtpHead(tmp_path, setup.reference)
    settings = GraphSettings((4,), Recorder().new_capture)
    drafts = []
    for stepper in (setup.stepper(MTP, graphs=settings), setup.stepper(MTP)):
        drafts.append(record(stepper, monkeypatch))
        run = Generation(stepper, WANTS, NUM_TOKENS, allow=lambda _: (4, 3), depth=2)
        check(run, setup.truth)
    assert settings.may_capture(draft_graphs.KIND)
    assert drafts[0] == drafts[1] != []


class RecurrentMtpHead:
    """The MTP layer of a recurrent model: a model of its own, whose embeddings are made of tokens and states.

    Nemotron-H has layers of one half each, and norms without a summand of 1.
    """

    def __init__(self, folder: Path, kind: str, target: PreTrainedModel, **overrides: Any) -> None:
        self._target = target
        is_nemotron = kind == "nemotron_h"
        one: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        if is_nemotron:
            one = {"layers_block_type": ["full_attention", "moe"]}
        self._layer = save_tiny(folder / "mtp", kind, **one, **overrides)
        generator = torch.Generator().manual_seed(4)
        hidden = target.config.hidden_size
        self._joined = torch.randn(hidden, 2 * hidden, generator=generator) * 0.15
        norms = [torch.randn(hidden, generator=generator) * 0.1 for _ in range(2)]
        self._norms, self._eps = [1 + norm for norm in norms], 1e-5 if is_nemotron else 1e-6
        names = "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
        last = "norm"
        if is_nemotron:
            norms, last = self._norms, "layers.1.final_layernorm"
            names = "layers.0.eh_proj", "layers.0.enorm", "layers.0.hnorm"
        tensors = dict(zip(names, (self._joined, *norms), strict=True))
        stored = load_file(folder / "model.safetensors")
        stored |= {f"mtp.{name}.weight": value for name, value in tensors.items()}
        for name, value in load_file(folder / "mtp" / "model.safetensors").items():
            bare = name.split(".", 1)[1]
            if "embed" not in name and "lm_" not in name:
                is_last = bare in ("norm.weight", "norm_f.weight")
                stored[f"mtp.{last}.weight" if is_last else f"mtp.{bare}"] = value
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    def draft(self, ids: list[int], most: int) -> list[int]:
        """The chain of drafts after `ids`, whose last token the target has not computed."""
        with torch.no_grad():
            states = self._target.model(torch.tensor([ids[:-1]])).last_hidden_state
            tokens, drafts = list(ids[1:]), list[int]()
            for _ in range(most):
                embedded = self._target.get_input_embeddings()(torch.tensor([tokens]))
                pairs = zip((embedded, states), self._norms, strict=True)
                normed = [F.rms_norm(x, x.shape[-1:], norm, self._eps) for x, norm in pairs]
                joined = torch.cat(normed, dim=-1) @ self._joined.T
                result = self._layer.model(inputs_embeds=joined).last_hidden_state[:, -1:]
                drafts.append(int(self._target.lm_head(result)[0, -1].argmax()))
                states, tokens = torch.cat([states, result], dim=1), [*tokens, drafts[-1]]
        return drafts


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        *((kind, {}) for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")),
        ("nemotron_h", {"moe_latent_size": 24}),
    ],
)
def test_mtp_layers_of_recurrent_models_draft_by_their_formula_and_change_no_bit(
    kind: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = make_kernels("plain", deterministic=True, block_size=8)
    setup = setup_of(tmp_path, kind, kernels, torch.float32, **overrides)
    mtp = RecurrentMtpHead(tmp_path, kind, setup.reference, **overrides)
    stepper = setup.stepper(MTP)
    drafts = record(stepper, monkeypatch)
    random = np.random.default_rng(2)
    run = Generation(
        stepper,
        WANTS,
        NUM_TOKENS,
        allow=lambda _: (int(random.integers(1, 5)), int(random.integers(0, 4))),
        chunk=7,
        depth=2,
    )
    check(run, setup.truth)
    assert len(drafts) > 20
    for slot, length, ids in drafts[:12]:
        whole = [*WANTS[slot].prompt, *setup.truth[slot].ids][:length]
        assert list(ids) == mtp.draft(whole, len(ids))


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("glm4_moe", "model.layers.4."),
        ("qwen3_next", "mtp.layers.0."),
        ("nemotron_h", "mtp.layers.0.mixer."),
    ],
)
def test_mtp_layers_without_a_linear_are_refused_by_their_header(
    kind: str, own: str, tmp_path: Path
) -> None:
    model, path = save_tiny(tmp_path, kind), tmp_path / "model.safetensors"
    MtpHead(tmp_path, model) if kind == "glm4_moe" else RecurrentMtpHead(tmp_path, kind, model)
    tensors, spec = load_file(path), ModelDescription.read(tmp_path).spec
    assert spec is not None
    (name,) = (name for name in tensors if name.startswith(own) and "o_proj.weight" in name)
    save_file(tensors | {name: tensors[name][1:]}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"tensor {name} in .* for the model it must be"):
        read_head(MTP, tmp_path, spec, 1)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"there is no tensor of {name.removesuffix('.weight')}"):
        read_head(MTP, tmp_path, spec, 1)


def test_mtp_layers_of_nemotron_of_other_kinds_are_refused(tmp_path: Path) -> None:
    RecurrentMtpHead(tmp_path, "nemotron_h", save_tiny(tmp_path, "nemotron_h"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["mtp.layers.1.mixer.gate.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    with pytest.raises(ModelError, match="one with attention, then one with experts"):
        read_head(MTP, tmp_path, spec, 1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 32}, "another hidden_size: 32, the model has 64"),
    ({"vocab_size": 200}, "another vocab_size: 200, the model has 199"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}, r"after layers \[2, 3, 5\], the model has 4"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, r"fc.weight .* must be \[64, 128\]"),
    ({"draft_vocab_size": 100}, r"lm_head.weight .* must be \[100, 64\]"),
    ({"num_hidden_layers": 2}, "has 2 layers, only heads of one are supported"),
    ({"model_type": "qwen3"}, "model_type='qwen3', only llama is supported"),
    ({"norm_before_fc": True}, "norm_before_fc, a variant that is not supported"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "reads only the last hidden state"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(each) for each, _ in REFUSED])
def test_heads_that_do_not_fit_are_refused_before_weights_are_read(
    setup: Setup, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    head = EagleHead(setup.reference, is_third=True, draft_vocab=120).save(tmp_path, **changes)
    spec = ModelDescription.read(setup.folder).spec
    assert spec is not None
    with pytest.raises(ModelError, match=message):
        read_head(head, setup.folder, spec, 1)


def test_a_head_with_unknown_tensors_is_refused(setup: Setup, tmp_path: Path) -> None:
    head = EagleHead(setup.reference, is_third=True)
    head.tensors["fc_norm.0.weight"] = torch.ones(64)
    spec = ModelDescription.read(setup.folder).spec
    assert spec is not None
    with pytest.raises(ModelError, match=r"it has a tensor fc_norm\.0\.weight"):
        read_head(head.save(tmp_path), setup.folder, spec, 1)


def test_mtp_of_a_checkpoint_without_such_a_layer_is_refused(setup: Setup) -> None:
    spec = ModelDescription.read(setup.folder).spec
    assert spec is not None
    with pytest.raises(ModelError, match=r"no MTP layer, for tensor model\.layers\.4\.enorm"):
        read_head(MTP, setup.folder, spec, 1)


def test_layers_that_are_counted_from_0_mean_the_states_after_them(
    setup: Setup, tmp_path: Path
) -> None:
    head = EagleHead(setup.reference, is_third=True)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    changes = {"eagle_aux_hidden_state_layer_ids": None, **nested}
    spec = ModelDescription.read(setup.folder).spec
    assert spec is not None
    assert read_head(head.save(tmp_path, **changes), setup.folder, spec, 1).taps == (2, 3, 4)


def test_few_right_drafts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    check = AcceptanceCheck("the head is strange")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            check.add(400, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "only 30 of 1200 draft tokens were right, which makes answers slower; likely, the head is strange"
    ]
    caplog.clear()
    good = AcceptanceCheck("none")
    for _ in range(4):
        good.add(400, 30)
    assert not caplog.records


def test_two_ranks_draft_alike_and_yield_the_tokens_of_one(
    setup: Setup, fitted: Fitted, tmp_path: Path
) -> None:
    prompts = [list(WANTS[slot].prompt) for slot in (0, 2)]
    small = EagleHead(setup.reference, is_third=True, draft_vocab=121).save(tmp_path / "small")
    drafts = (fitted.save(tmp_path / "fitted"), small)
    jobs = [RankJob(setup.folder, draft, prompts, NUM_TOKENS) for draft in drafts]
    first, second = run_ranks(tmp_path, 2, speculate_on_a_rank, jobs)
    assert first == second
    runs, _ = first
    for yielded, drafted, _ in runs:
        assert drafted > 0
        for slot, prompt in enumerate(prompts):
            assert yielded[slot].ids == greedy(setup.reference, prompt, NUM_TOKENS)[0]
    assert runs[0][2] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_on_cpu_kernels_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    kernels = make_kernels("cpu", deterministic=True)
    setup = setup_of(
        tmp_path / "model",
        "llama",
        kernels,
        dtype,
        num_hidden_layers=4,
        head_dim=32,
        intermediate_size=96,
    )
    for number, kind in enumerate(("eagle3", "eagle")):
        head = EagleHead(setup.reference, **KINDS[kind]).save(tmp_path / str(number), head_dim=16)
        random = np.random.default_rng(number)
        run = Generation(
            setup.stepper(head),
            WANTS,
            NUM_TOKENS,
            allow=lambda _, random=random: (  # type: ignore[misc]
                int(random.integers(1, 7)),
                int(random.integers(0, 6)),
            ),
            chunk=7,
            depth=2,
        )
        check(run, setup.truth)
        assert run.drafted > 20
