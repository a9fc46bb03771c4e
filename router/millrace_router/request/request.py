"""A request after validation: token ids, clamped limits, resolved defaults; and the seeds of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from random import SystemRandom

from millrace_proto import sequence
from millrace_proto.sampling import Sampling
from millrace_proto.sequence import GrammarKind as GrammarKind
from millrace_router.request.adapter import AdapterVersion
from millrace_router.request.continuation import Choice
from millrace_router.request.images import ImageSpan

AnswerText = Callable[[], Callable[[str], str]]
"""Makes a function that takes more text of a generation, and returns the part of it that is the answer."""


class FinishReason(StrEnum):
    """Why a generation ended, in TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"  # noqa: S105
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True, slots=True)
class Grammar(sequence.Grammar):
    """The generated text as a whole matches it."""

    closes: bool = False
    """Whether the text is closed before the request's last token: JSON in an answer is, and calls of tools are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParameters:
    """Parameters of the queue, which do not change the generated tokens."""

    priority: int = 0
    """A higher priority is served sooner; -10 to 10."""
    tenant: str = ""
    """The tenant whose share of the tokens the request takes."""
    max_queue_seconds: float | None = None
    """The longest wait in the queue; None for no limit."""
    client: str = field(default="", compare=False)
    """The sender, by which fetches of adapters are shared: tenant, key or address; "" for the server itself."""


class Task(StrEnum):
    """What a server does with its model."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class Pooling(sequence.Pooling):
    """Pooling, and what it needs of the server."""

    __slots__ = ()

    @property
    def task(self) -> Task:
        """The task that the server needs for it."""
        return Task.SCORE if self.logit_ids else Task.EMBED


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request that passed validation, and is not checked again."""

    input_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    """The placeholders of pictures in the prompt, in order."""
    max_new_tokens: int
    """The client's limit, or the part of `max_total_tokens` that the prompt leaves."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_sequences: tuple[str, ...] = ()
    answer_text: AnswerText | None = field(default=None, compare=False)
    """Makes what finds the text in which stop sequences count; None: all."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer, also with `ignore_eos`."""
    cache_salt: tuple[str, ...] = ()
    """Part of the keys of its KV blocks."""
    min_new_tokens: int = 0
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
    """Whether the answer has the log probabilities of the prompt's tokens."""
    prompt_top_n_tokens: int = 0
    """Other candidates for each token of the prompt."""
    grammar: Grammar | None = None
    adapter: AdapterVersion | None = None
    """The version that all its tokens are computed with; None for the base model."""
    scheduling: SchedulingParameters = SchedulingParameters()
    pooling: Pooling | None = None
    """None: it generates tokens."""
    choice: Choice | None = field(default=None, compare=False)
    """The choice of an answer whose tokens are recorded; None for any other."""


_random = SystemRandom()


def random_seed() -> int:
    """Draw a 64-bit number."""
    return _random.getrandbits(64)


def seed_of_sample(seed: int, index: int) -> int:
    """Return the seed of the sample `index`, from 0, of a request with `seed`.

    The first sample has `seed`. The others have the first 8 bytes of SHA-256 over `seed` and `index`; all numbers have
    8 bytes and are big-endian.
    """
    if index == 0:
        return seed
    return int.from_bytes(sha256(seed.to_bytes(8) + index.to_bytes(8)).digest()[:8])
