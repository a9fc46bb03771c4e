"""Clients of a scheduler under test: each reads its own stream and compares every event with the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from millrace_router.errors import NonFiniteOutput, Quarantined
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import Finished, PromptLogprobs, TokenEvent, TokenStream
from millrace_testing.shards.hash_tokens import (
    EOS_TOKEN_ID,
    POISON_TOKEN_ID,
    expected_prompt_candidates,
    expected_prompt_logprobs,
    expected_tokens,
)


def expected_end(request: ValidRequest, *, eos_every: int) -> tuple[list[int], FinishReason]:
    """All tokens of a request, and the reason of their end."""
    tokens = expected_tokens(
        request.input_ids,
        request.max_new_tokens,
        seed=request.sampling.seed,
        eos_every=eos_every,
        min_new_tokens=request.min_new_tokens,
        adapter=_adapter_of(request),
    )
    text = ""
    for number, token_id in enumerate(tokens, 1):
        text += "" if token_id == EOS_TOKEN_ID else f" w{token_id}"
        if number == request.max_new_tokens:
            return tokens[:number], FinishReason.LENGTH
        if token_id == EOS_TOKEN_ID:
            return tokens[:number], FinishReason.EOS_TOKEN
        if any(stop in text for stop in request.stop_sequences):
            return tokens[:number], FinishReason.STOP_SEQUENCE
    raise AssertionError("a generation without an end")


def _adapter_of(request: ValidRequest) -> str:
    return "" if request.adapter is None else request.adapter.digest


@dataclass(eq=False)
class Client:
    """One request with its received and expected events. Wrong events are recorded in `wrong`."""

    request: ValidRequest
    stream: TokenStream
    eos_every: int
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    error: Exception | None = None
    has_left: bool = False
    may_fail: bool = False
    """Whether it may fail through no fault of its own: its KV was corrupted, or the server stops."""
    num_failures: int = 0
    """Failed steps that it was in; from the second on it may count as their cause."""
    wrong: list[str] = field(default_factory=list)
    """Violations; kept because a listener must not raise into the batcher."""

    def __post_init__(self) -> None:
        self._tokens, self._reason = expected_end(self.request, eos_every=self.eos_every)
        self.stream.connect(self)

    @property
    def has_ended(self) -> bool:
        """Whether no further event may come."""
        return self.finished is not None or self.error is not None or self.has_left

    @property
    def is_poisoned(self) -> bool:
        """Whether its own prompt makes its values not finite."""
        return POISON_TOKEN_ID in self.request.input_ids

    def leave(self) -> None:
        """Close the stream, at any moment."""
        self.has_left = True
        self.stream.close()

    def token(self, event: TokenEvent) -> None:
        """Take the next token."""
        self._expect(not self.has_ended, f"an event after the end: {event}")
        if not self.tokens:
            self._check_prompt(self.stream.prompt_logprobs)
        self.tokens.append(event.token.id)
        number = len(self.tokens)
        self._expect(event.index == number, f"token {event.index} where {number} is due")
        self._expect(not self.is_poisoned, "a token computed from what is not finite")
        self._expect(
            self.tokens == self._tokens[:number],
            f"tokens {self.tokens} instead of {self._tokens[:number]}",
        )
        is_last = number == len(self._tokens)
        self._expect((event.finished is not None) == is_last, f"end at token {number}: {event}")
        if event.finished is not None:
            self.finished = event.finished
            reason, count = event.finished.finish_reason, event.finished.generated_tokens
            self._expect((reason, count) == (self._reason, number), f"a wrong end: {event}")

    def fail(self, error: Exception) -> None:
        """Take the failure of the generation."""
        self._expect(not self.has_ended, f"an error after the end: {error}")
        self.error = error
        if not self.may_fail:
            own = self.is_poisoned and isinstance(error, NonFiniteOutput)
            own |= self.num_failures > 1 and isinstance(error, Quarantined)
            self._expect(own, f"failed without a reason: {error}")

    def check(self) -> None:
        """Raise AssertionError if any event was wrong."""
        assert not self.wrong, self.wrong

    def _check_prompt(self, prompt: PromptLogprobs | None) -> None:
        wants = self.request.prefill_logprobs
        self._expect((prompt is not None) == wants, "log probabilities of the prompt if wanted")
        if prompt is None:
            return
        self._expect(prompt.ids == self.request.input_ids, "of another prompt")
        first, *others = prompt.logprobs
        adapter = _adapter_of(self.request)
        self._expect(math.isnan(first), "the first token has a log probability")
        if not self.is_poisoned and not self.may_fail:
            expected = expected_prompt_logprobs(self.request.input_ids, adapter)
            self._expect(others == expected, f"log probabilities {others}, not {expected}")
            count = self.request.prompt_top_n_tokens
            told = [list(prompt.candidates(i)) for i in range(1, len(prompt.ids))]
            named = expected_prompt_candidates(self.request.input_ids, count, adapter)
            self._expect(told == named, f"candidates {told}, not {named}")

    def _expect(self, condition: bool, message: str) -> None:
        if not condition:
            self.wrong.append(message)
