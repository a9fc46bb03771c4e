"""The parameters of the choice of the next token in both planes, each once, with its ranges and its neutral value.

The fields have the names of `NextTokenChooserParameters` on the wire, of TGI's requests and, but for the penalties, of
OpenAI's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # At runtime, a reader of the flags needs no protobuf.
    from millrace_proto import generate_pb2 as pb

FLOAT32_LEAST = 2.0**-126
"""The least normal number above 0 of float32."""
FLOAT32_MOST = float.fromhex("0x1.fffffep127")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `least` to `most`; with `is_open` without these two."""

    least: float = -math.inf
    most: float = math.inf
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        if self.is_open:
            return self.least < value < self.most
        return self.least <= value <= self.most

    def __str__(self) -> str:
        """The range in TGI's words, to follow a name."""
        if self.is_open and self.least == 0 and self.most == math.inf:
            return "must be strictly positive"
        more, less = (">", "<") if self.is_open else (">=", "<=")
        bounds = ((more, self.least), (less, self.most))
        parts = [f"{sign} {float(bound)}" for sign, bound in bounds if math.isfinite(bound)]
        return f"must be {' and '.join(parts) or 'finite'}"


POSITIVE = Range(0, is_open=True)
SHARE = Range(0, 1)
FINITE = Range(is_open=True)


def _open(
    allowed: Range, *, warps: bool = True, off: float | None = None, default: float | None = None
) -> Any:  # noqa: ANN401
    return field(default=default, metadata={"allowed": allowed, "warps": warps, "off": off})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Parameters that a client may leave open, which is None, in the order in which TGI checks them."""

    temperature: float | None = _open(POSITIVE)
    repetition_penalty: float | None = _open(POSITIVE, warps=False)
    frequency_penalty: float | None = _open(Range(-2, 2), warps=False)
    """TGI's, over the prompt and the answer."""
    top_p: float | None = _open(Range(0, 1, is_open=True))
    typical_p: float | None = _open(Range(0, 1, is_open=True))
    top_k: int | None = _open(POSITIVE)
    min_p: float | None = _open(SHARE, off=0)
    top_n_sigma: float | None = _open(Range(0), off=0)
    xtc_probability: float | None = _open(SHARE, off=0)
    xtc_threshold: float = _open(SHARE, warps=False, default=0.1)

    def refusal(self) -> str | None:
        """Return what is wrong with the first parameter that is out of range, in TGI's words."""
        for one in fields(SamplingRequest):
            value = getattr(self, one.name)
            if value is not None and value not in one.metadata["allowed"]:
                return f"`{one.name}` {one.metadata['allowed']}"
        return None

    def has_warpers(self) -> bool:
        """Whether a parameter that only sampling heeds is set, and not switched off."""
        return any(
            getattr(self, one.name) not in {None, one.metadata["off"]}
            for one in fields(SamplingRequest)
            if one.metadata["warps"]
        )

    def chosen(self) -> dict[str, Any]:
        """The parameters that are set, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(SamplingRequest)}
        return {name: value for name, value in values.items() if value is not None}


WARPERS = tuple(one.name for one in fields(SamplingRequest) if one.metadata["warps"])
"""Parameters that only sampling heeds."""


def preset(allowed: Range, *neutral: float, kind: tuple[type, ...] = (int, float)) -> Any:  # noqa: ANN401
    """Return a field of `SamplingPresets`: the range, the values that restrict nothing, and the JSON types."""
    return field(default=None, metadata={"allowed": allowed, "neutral": neutral, "kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPresets:
    """Values that a model's own generation_config.json may give for what a request leaves out; None leaves it open."""

    temperature: float | None = preset(Range(0), 1)
    """0 stands for greedy decoding."""
    top_k: int | None = preset(Range(-1), 0, -1, kind=(int,))
    top_p: float | None = preset(Range(math.ulp(0), 1), 1)
    min_p: float | None = preset(SHARE, 0)
    repetition_penalty: float | None = preset(POSITIVE, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """The DRY penalty: a token that would extend a passage that the sequence has repeated so far becomes less likely.

    It is lowered by `multiplier` * `base` ** (length of the passage - `allowed_length`).
    """

    multiplier: float
    base: float
    allowed_length: int
    """Shorter passages are free."""
    window: int
    """The number of last tokens that are searched; 0 for all."""
    breakers: tuple[int, ...] = ()
    """Tokens that no passage contains."""

    @property
    def is_valid(self) -> bool:
        """Whether the numbers have a meaning."""
        return all(0 <= one < math.inf for one in (self.multiplier, self.base))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRules:
    """Rules that few sequences have; by default there are none."""

    allowed_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Passages that the generated tokens may not have, none of them empty."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that are not drawn before the minimum of new tokens, besides the model's end-of-sequence ids."""
    dry: Dry | None = None

    def __bool__(self) -> bool:
        return bool(self.allowed_ids or self.bad_words or self.stop_ids or self.dry)

    @property
    def is_valid(self) -> bool:
        """Whether all rules have a meaning."""
        return all(self.bad_words) and (self.dry is None or self.dry.is_valid)

    def ids(self) -> Iterator[int]:
        """Return all token ids that the rules name."""
        breakers = () if self.dry is None else self.dry.breakers
        return chain(self.allowed_ids, *self.bad_words, self.stop_ids, breakers)

    def to_pb(self, message: pb.NextTokenChooserParameters) -> None:
        """Write the rules into `message`, which has none."""
        message.allowed_ids.extend(self.allowed_ids)
        message.bad_word_ids.extend(id_ for word in self.bad_words for id_ in word)
        message.bad_word_lengths.extend(map(len, self.bad_words))
        message.stop_ids.extend(self.stop_ids)
        if self.dry is not None:
            for name in _DRY_NUMBERS:
                setattr(message.dry, name, getattr(self.dry, name))
            message.dry.breaker_ids.extend(self.dry.breakers)
            message.dry.SetInParent()

    @classmethod
    def from_pb(cls, message: pb.NextTokenChooserParameters) -> SequenceRules:
        """Read the rules of a sequence."""
        ids, dry = iter(message.bad_word_ids), None
        if message.HasField("dry"):
            numbers = {name: getattr(message.dry, name) for name in _DRY_NUMBERS}
            dry = Dry(**numbers, breakers=tuple(message.dry.breaker_ids))
        return cls(
            allowed_ids=tuple(message.allowed_ids),
            bad_words=tuple(tuple(islice(ids, length)) for length in message.bad_word_lengths),
            stop_ids=tuple(message.stop_ids),
            dry=dry,
        )


NO_RULES = SequenceRules()
_DRY_NUMBERS = ("multiplier", "base", "allowed_length", "window")


def _number(default: float, valid: Range, least: float, most: float) -> Any:  # noqa: ANN401
    return field(default=default, metadata={"valid": valid, "stored": (least, most)})


def _positive() -> Any:  # noqa: ANN401
    # As float32, a smaller value would be 0 and a larger one infinite, and both turn some scores into NaN.
    return _number(1.0, POSITIVE, FLOAT32_LEAST, FLOAT32_MOST)


def _mass() -> Any:  # noqa: ANN401
    return _number(1.0, POSITIVE, 0.0, 1.0)


def _penalty() -> Any:  # noqa: ANN401
    return _number(0.0, FINITE, -FLOAT32_MOST, FLOAT32_MOST)


def _part(valid: Range) -> Any:  # noqa: ANN401
    return _number(0.0, valid, 0.0, FLOAT32_MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of the choice of the next token; the defaults are the neutral values of the wire."""

    temperature: float = _positive()
    top_k: int = 0
    top_p: float = _mass()
    typical_p: float = _mass()
    do_sample: bool = False
    seed: int = 0
    """64 bits without a sign."""
    repetition_penalty: float = _positive()
    frequency_penalty: float = _penalty()
    """TGI's, over prompt and generated tokens."""
    presence_penalty: float = _penalty()
    """OpenAI's, over generated tokens."""
    openai_frequency_penalty: float = _penalty()
    """OpenAI's `frequency_penalty`, over generated tokens."""
    min_p: float = _part(SHARE)
    top_n_sigma: float = _part(Range(0, FLOAT32_MOST))
    xtc_probability: float = _part(SHARE)
    xtc_threshold: float = 0.0
    watermark: bool = False
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its score), each id once."""
    rules: SequenceRules = NO_RULES

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random: the client requested it, or a warper is active."""
        return self.do_sample or any(getattr(self, name) != NEUTRAL[name] for name in WARPERS)

    def refusal(self) -> str | None:
        """Return what is wrong with the first value without a meaning."""
        for name, valid in _VALID.items():
            if getattr(self, name) not in valid:
                return f"`{name}` {valid}"
        if not self.rules.is_valid:
            return "bad words need tokens, and DRY's numbers have to be finite"
        if not all(math.isfinite(value) for _, value in self.bias):
            return "biases have to be finite"
        return None

    def stored(self, name: str) -> Any:  # noqa: ANN401
        """The number `name`, a scalar, in the range in which it is stored as float32."""
        least, most = _STORED.get(name, (-math.inf, math.inf))
        return min(max(getattr(self, name), least), most)

    def to_pb(self, message: pb.NextTokenChooserParameters) -> None:
        """Write all parameters into `message`, which has none; `do_sample` is `samples`."""
        for one in SCALARS:
            setattr(message, one.name, getattr(self, one.name))
        message.do_sample = self.samples
        message.bias_ids.extend(id_ for id_, _ in self.bias)
        message.bias_values.extend(value for _, value in self.bias)
        self.rules.to_pb(message)

    @classmethod
    def from_pb(cls, message: pb.NextTokenChooserParameters) -> Sampling:
        """Read the parameters of a sequence."""
        return cls(
            **{one.name: getattr(message, one.name) for one in SCALARS},
            bias=tuple(zip(message.bias_ids, message.bias_values, strict=False)),
            rules=SequenceRules.from_pb(message),
        )


SCALARS: tuple[Field[Any], ...] = tuple(
    one for one in fields(Sampling) if one.name not in {"bias", "rules"}
)
"""The parameters that are one number or one switch, with the type of their default."""
NEUTRAL = {one.name: one.default for one in SCALARS}
_VALID = {one.name: one.metadata["valid"] for one in SCALARS if one.metadata}
_STORED = {one.name: one.metadata["stored"] for one in SCALARS if one.metadata}
