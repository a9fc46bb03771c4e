"""Heads that draft from a model's hidden states, as their files describe them, before any weight is read.

EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) heads have their own folder; MTP layers (DeepSeek-V3,
arXiv 2412.19437, section 2.2) follow the layers of the model in its own files. Trees of drafts are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.models.families.nemotron_h import MTP_NAMES
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.quantized import named_linears
from millrace_shard.models.rope import longest_position
from millrace_shard.models.spec import DecoderSpec, Halves, LayerNames, LayerSpec, WeightNames
from millrace_shard.models.split import check_split
from millrace_shard.speculation.checkpoints import MTP, read_config
from millrace_shard.weights.gguf.known_folders import MODEL
from millrace_shard.weights.safetensor_files import SafetensorFiles


class HeadKind(Enum):
    """How a head joins hidden states and tokens."""

    EAGLE = "EAGLE"
    """One layer without its first norm, over `fc` of the token's embedding and the normed last state."""
    EAGLE3 = "EAGLE-3"
    """One layer whose attention reads the embedding and the state, at first `fc` of states of several layers."""
    MTP = "MTP"
    """A layer like the model's, over a linear of the normed embedding and the normed last state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head, before it is split over ranks."""

    kind: HeadKind
    folder: Path
    decoder: DecoderSpec
    """Sizes, and the layer at `index`; layers before it are the model's."""
    index: int
    prefix: str
    """Begins the names of the layer's tensors."""
    join: str = "fc"
    """The linear over tokens and states, or over states."""
    norms: tuple[str, ...] = ()
    """Of tokens and of states, then with MTP of the results."""
    taps: tuple[int, ...]
    """The head reads the residual stream after so many layers each: 0 is the embedding."""
    norm_before_residual: bool = False
    """Whether the residual of the layer begins with the normed state."""
    draft_vocab_size: int | None = None
    """Outputs of the head's own output head; None: it drafts by the model's."""
    has_embedding: bool = False
    """Whether it has its own embedding."""
    has_bias: bool = False
    """Whether `fc` has a bias."""
    is_mapped: bool = False
    """Whether `d2t` says what token each output stands for."""

    @property
    def layer(self) -> LayerSpec:
        return self.decoder.layers[self.index]


VARIANTS = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
"""Fields of EAGLE-3 heads that change what they compute, and are not supported."""
TAPS = "eagle_aux_hidden_state_layer_ids"
_MTP_NORMS = "enorm", "hnorm", "shared_head.norm"
_LAYER_NORMS = "input_layernorm", "post_attention_layernorm"
_QWEN_MTP = "mtp."
"""Begins the names of Qwen's MTP layer, which always has attention."""
_QWEN_MTP_NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
_NEMOTRON_MTP = "mtp.layers."
"""Begins the names of Nemotron-H's MTP layers: one with attention, then one with experts."""
_NEMOTRON_MTP_NORMS = "0.enorm", "0.hnorm", "1.final_layernorm"
_EAGLE_NAMES = WeightNames(layer=LayerNames(before_attention=None))


def read_head(name: Path, folder: Path, target: DecoderSpec, world_size: int) -> HeadSpec:
    """The head in the folder `name`, or the MTP layer of the model in `folder` if it is `mtp`, for `target`.

    Raises ModelError for a head that does not fit the model or the ranks; only headers of files are read.
    """
    head = _mtp(folder, target) if name == MTP else _eagle(name, target)
    check_split(head.decoder, world_size)
    return head


def _mtp(folder: Path, target: DecoderSpec) -> HeadSpec:
    if (folder / MODEL).is_file():
        raise UnsupportedModel(
            "MTP layers are read from safetensors: --speculator mtp is not for GGUF files"
        )
    index = len(target.layers)
    prefix, hidden = f"{target.names.layers}.{index}.", target.hidden_size
    join, norms = f"{prefix}eh_proj", [f"{prefix}{name}" for name in _MTP_NORMS]
    layer, names = replace(target.layers[-1], recurrent=None), target.names
    with closing(SafetensorFiles(folder)) as files:
        if f"{_NEMOTRON_MTP}0.eh_proj.weight" in files:
            prefix, join = _NEMOTRON_MTP, f"{_NEMOTRON_MTP}0.eh_proj"
            norms = [f"{prefix}{name}" for name in _NEMOTRON_MTP_NORMS]
            layer, names = _nemotron_layer(files, target), replace(names, layer=MTP_NAMES)
        elif f"{_QWEN_MTP}fc.weight" in files:
            prefix, join = f"{_QWEN_MTP}layers.0.", f"{_QWEN_MTP}fc"
            norms = [f"{_QWEN_MTP}{name}" for name in _QWEN_MTP_NORMS]
        shapes = {f"{name}.weight": (hidden,) for name in norms}
        for name, shape in (shapes | {f"{join}.weight": (hidden, 2 * hidden)}).items():
            if name not in files:
                raise UnsupportedModel(
                    f"--speculator mtp: {folder} has no MTP layer, for tensor {name} is missing"
                )
            _check_shape(files, name, shape)
        more = max(0, target.num_more_layers - 1)
        layers = (*target.layers, layer)
        decoder = replace(target, layers=layers, num_more_layers=more, names=names)
        _check_linears(files, decoder, prefix)
    return HeadSpec(
        kind=HeadKind.MTP,
        folder=folder,
        decoder=decoder,
        index=index,
        prefix=prefix,
        join=join,
        norms=tuple(norms),
        taps=(index,),
    )


def _nemotron_layer(files: SafetensorFiles, target: DecoderSpec) -> LayerSpec:
    """Both MTP layers as one with two halves. Raises UnsupportedModel for layers of other kinds."""
    needed = (MTP_NAMES.query, MTP_NAMES.experts[0].router)
    has_both = all(f"{_NEMOTRON_MTP}{name}.weight" in files for name in needed)
    has_more = any(name.startswith(f"{_NEMOTRON_MTP}2.") for name in files.names())
    experts = [each for each in target.layers if each.has_feed_forward and each.mixture]
    if not has_both or has_more or not experts:
        raise UnsupportedModel(
            "--speculator mtp: the MTP layers of Nemotron-H have to be one with attention, then one with experts"
        )
    return replace(experts[0], attention=target.attentions[0], recurrent=None, halves=Halves.BOTH)


def _eagle(folder: Path, target: DecoderSpec) -> HeadSpec:
    raw = read_config(folder)
    nested = raw.get("transformer_layer_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else raw
    with closing(SafetensorFiles(folder)) as files:
        if _is_eagle3(raw, files):
            return _Eagle3(folder, raw, text, files, target).read()
        return _checked_eagle(folder, _decoder(folder, text, target), files, target)


def _is_eagle3(raw: Mapping[str, Any], files: SafetensorFiles) -> bool:
    return "draft_vocab_size" in raw or any(
        name in files
        for name in ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    )


def _decoder(folder: Path, text: Mapping[str, Any], target: DecoderSpec) -> DecoderSpec:
    """The decoder of the head's config, which has to be Llama's, with the positions of the target."""
    kind = text.get("model_type", "llama")
    if kind not in {"llama", "eagle"}:
        raise UnsupportedModel(
            f"the EAGLE head in {folder} has model_type={kind!r}, only llama is supported"
        )
    fields = {name: value for name, value in text.items() if name != "architectures"}
    if text.get("layer_types") == ["full_attention"]:
        del fields["layer_types"]
    spec = FAMILIES["llama"].read({**fields, "model_type": "llama"})
    if len(spec.layers) != 1:
        raise UnsupportedModel(
            f"the EAGLE head in {folder} has {len(spec.layers)} layers, only heads of one are supported"
        )
    for name, ours, theirs in (
        ("hidden_size", target.hidden_size, spec.hidden_size),
        ("vocab_size", target.vocab_size, spec.vocab_size),
    ):
        if ours != theirs:
            raise UnsupportedModel(
                f"the EAGLE head in {folder} is for a model of another {name}: {theirs}, the model has {ours}"
            )
    return replace(spec, layers=(_reaching(spec.layers[0], target),), names=_EAGLE_NAMES)


def _reaching(layer: LayerSpec, target: DecoderSpec) -> LayerSpec:
    """The layer with rotations for all positions of the target: heads are trained with few."""
    attention, theirs = layer.attention, [each.rope for each in target.attentions]
    if attention.rope is None:
        return layer
    longest = max((longest_position(rope) for rope in theirs if rope), default=target.max_positions)
    rope = replace(attention.rope, max_positions=max(attention.rope.max_positions, longest))
    return replace(layer, attention=replace(attention, rope=rope))


def _checked_eagle(
    folder: Path, decoder: DecoderSpec, files: SafetensorFiles, target: DecoderSpec
) -> HeadSpec:
    hidden = decoder.hidden_size
    _check_shape(files, "fc.weight", (hidden, 2 * hidden))
    known = {"fc.weight", "fc.bias", "embed_tokens.weight", "lm_head.weight"}
    # The embedding and the output head are copies of the model's.
    _check_names(folder, files, known, "layers.0.")
    return HeadSpec(
        kind=HeadKind.EAGLE,
        folder=folder,
        decoder=decoder,
        index=0,
        prefix="layers.0.",
        taps=(len(target.layers),),
        has_bias="fc.bias" in files,
    )


@dataclass(frozen=True, slots=True)
class _Eagle3:
    """Reads an EAGLE-3 head; `text` has the fields of the layer."""

    folder: Path
    raw: Mapping[str, Any]
    text: Mapping[str, Any]
    files: SafetensorFiles
    target: DecoderSpec

    def read(self) -> HeadSpec:
        """Raises ModelError."""
        for name in VARIANTS:
            if self._field(name):
                raise UnsupportedModel(
                    f"the EAGLE-3 head in {self.folder} has {name}, a variant that is not supported"
                )
        if self._field("use_aux_hidden_state") is False:
            raise UnsupportedModel(
                f"the EAGLE-3 head in {self.folder} reads only the last hidden state, which is not supported"
            )
        files, decoder = self.files, _decoder(self.folder, self.text, self.target)
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in files else "layers.0."
        hidden, taps = decoder.hidden_size, self._taps()
        _check_shape(files, "fc.weight", (hidden, len(taps) * hidden))
        known = {"fc.weight", "fc.bias", "norm.weight", "embed_tokens.weight", "lm_head.weight"}
        norms = f"{prefix}input_layernorm", f"{prefix}hidden_norm"
        own = {f"{name}.weight" for name in norms}
        _check_names(self.folder, files, known | own | {"d2t", "t2d"}, prefix)
        size, is_mapped = self._vocabulary(hidden), "d2t" in files
        # Heads in the format of `speculators` say so; others have the residual before the norm.
        default = "speculators_model_type" in self.raw
        return HeadSpec(
            kind=HeadKind.EAGLE3,
            folder=self.folder,
            decoder=decoder,
            index=0,
            prefix=prefix,
            norms=norms,
            taps=taps,
            norm_before_residual=bool(self.raw.get("norm_before_residual", default)),
            draft_vocab_size=size,
            has_embedding="embed_tokens.weight" in files,
            has_bias="fc.bias" in files,
            is_mapped=is_mapped,
        )

    def _field(self, name: str) -> Any:  # noqa: ANN401
        """A field of the config, or of the object `eagle_config` in it."""
        nested = self.raw.get("eagle_config")
        return self.raw.get(name, nested.get(name) if isinstance(nested, dict) else None)

    def _taps(self) -> tuple[int, ...]:
        """Numbers of layers, which a head that does not name them has by the rule of its paper's code.

        Some name the layers from 0 on, of which the first is then 1, and mean the states after them.
        """
        count, named = len(self.target.layers), self._field(TAPS)
        taps = named if named is not None else [2, count // 2, count - 3]
        if isinstance(taps, list) and taps and taps[0] == 1:
            taps = [tap + 1 if isinstance(tap, int) else tap for tap in taps]
        if not isinstance(taps, list) or not all(type(t) is int and 0 <= t <= count for t in taps):
            raise UnsupportedModel(
                f"the EAGLE-3 head in {self.folder} reads hidden states after layers {taps},"
                f" the model has {count} layers: it was trained for another one"
            )
        return tuple(taps)

    def _vocabulary(self, hidden: int) -> int | None:
        """How many tokens its own output head has; None without one."""
        files, ours = self.files, self.target.vocab_size
        if "embed_tokens.weight" in files:
            _check_shape(files, "embed_tokens.weight", (ours, hidden))
        size = self.raw.get("draft_vocab_size") or ours
        if "lm_head.weight" not in files:
            if size != ours:
                raise ModelError(
                    f"the EAGLE-3 head in {self.folder} has no lm_head of {size} tokens"
                )
            return None
        _check_shape(files, "lm_head.weight", (size, hidden))
        if "d2t" in files:
            _check_shape(files, "d2t", (size,))
        elif size != ours:
            raise ModelError(
                f"the EAGLE-3 head in {self.folder} drafts {size} of {ours} tokens, and has no d2t that names them"
            )
        return size


def _check_shape(files: SafetensorFiles, name: str, shape: tuple[int, ...]) -> None:
    """Raise UnsupportedModel for another shape, WeightsError without the tensor."""
    stored = files.shape(name)
    if stored != shape:
        raise UnsupportedModel(
            f"tensor {name} in {files.file_name(name)} has shape {list(stored)}; for the model it must be {list(shape)}"
        )


def _check_linears(files: SafetensorFiles, decoder: DecoderSpec, prefix: str) -> None:
    """Refuse an MTP layer, the last of `decoder` with names behind `prefix`, without a linear or of other shapes."""
    own, names = f"{decoder.names.layers}.{len(decoder.layers) - 1}.", files.names()
    for norm in _LAYER_NORMS:
        if (name := f"{prefix}{norm}.weight") in files:
            _check_shape(files, name, (decoder.hidden_size,))
    for linear in named_linears(decoder)[:-1]:
        if not linear.module.startswith(own):
            continue
        module = prefix + linear.module.removeprefix(own)
        tensors = [name for name in names if name.startswith(f"{module}.")]
        if not tensors:
            raise UnsupportedModel(f"--speculator mtp: there is no tensor of {module}")
        if tensors == [f"{module}.weight"]:
            _check_shape(files, tensors[0], (linear.outputs, linear.inputs))


def _check_names(folder: Path, files: SafetensorFiles, known: set[str], prefix: str) -> None:
    """Refuse a head with tensors that no known form has."""
    of_layer = ("self_attn.", "mlp.", "post_attention_layernorm.")
    for name in files.names():
        is_known = name in known or name.startswith(tuple(prefix + each for each in of_layer))
        if not is_known:
            raise UnsupportedModel(
                f"the EAGLE head in {folder} is of a form that is not supported: it has a tensor {name}"
            )
