"""An accepted request inside the router."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from millrace_router.errors import NotResumable
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.continuation import Beginning, Choice, KnownToken
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.request.token_stream import (
    Finished,
    PromptChunk,
    PromptLogprobs,
    Token,
    TokenEvent,
    TokenStream,
    end_without_token,
)
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.text.stopping import StopMatcher
from millrace_router.text.tokenizer import Tokenizer

MAX_JUMP_FORWARD_TOKENS = 16
"""Most tokens forced by a grammar that one step computes in addition to a sampled one."""


class Entry(SchedulableRequest):
    """One accepted request: its parameters, its tokens so far, and the stream that they go to.

    Prompt and generated ids are kept, so that the scheduler can admit the request again with all of them as prompt.
    """

    def __init__(
        self,
        request_id: int,
        request: ValidRequest,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        *,
        block_size: int,
        keeps_content: bool = False,
        further_end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """With `keeps_content` its keys know their tokens. The shards do not know `further_end_ids`."""
        self.stream = TokenStream()
        super().__init__(
            request_id=request_id,
            num_prompt_tokens=len(request.input_ids),
            max_new_tokens=request.max_new_tokens,
            scheduling=request.scheduling,
            queued_at=self.stream.queued_at,
            max_jump_forward_tokens=0 if request.grammar is None else MAX_JUMP_FORWARD_TOKENS,
            wants_prompt_logprobs=request.prefill_logprobs,
            adapter=request.adapter,
            images=request.images,
        )
        self.request = request
        self.accounted = False
        """Whether the scheduler has accounted for its end."""
        self.generated_ids: list[int] = []
        self.is_closed = False
        """Whether the limit of tokens, and not the model, ends the text."""
        self._tokenizer, self.further_end_ids = tokenizer, further_end_ids
        self._eos_token_ids = frozenset[int]()
        if not request.ignore_eos:
            self._eos_token_ids = eos_token_ids | further_end_ids
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._text = IncrementalDetokenizer(tokenizer, request.input_ids)
        self._stop = StopMatcher(request.stop_sequences) if request.stop_sequences else None
        self._answer_text = request.answer_text() if request.answer_text is not None else None
        self._last_ids = self._eos_token_ids | self._stop_token_ids
        """Tokens that may end the generation."""
        self._forget_prompt_logprobs()
        adapter = request.adapter
        self._block_keys = BlockHashes(
            block_size,
            None if adapter is None else adapter.digest,
            request.cache_salt,
            keeps_content=keeps_content,
            adapter_name=None if adapter is None else adapter.name,
            images=request.images,
        )

    def resume(self) -> bool:
        """Take the tokens that are known already; return whether they are all.

        Raises:
            NotResumable: they are tokens of another request, as its prompt, its limits or its adapter have changed.

        """
        return False

    def record(self, token_id: int, logprob: float) -> None:
        """Keep the next token for another router, if its tokens are recorded; it is accepted after that.

        Raises:
            NotResumable: it is computed again, and is another one than before.

        """

    @property
    def closed(self) -> bool:
        """Whether its client has left."""
        return self.stream.closed

    def block_keys(self, count: int) -> Sequence[bytes]:
        """Return the keys of the first `count` full blocks of prompt and generated tokens."""
        return self._block_keys.first(count, self.request.input_ids, self.generated_ids)

    def admitted(self, now: float, num_cached: int) -> None:
        """Record an admission to the batch, the first or a later one, with `num_cached` tokens in the prefix cache."""
        if self.stream.batched_at is None:
            self.stream.batched_at = now
            self.stream.cached_tokens = num_cached
        self._forget_prompt_logprobs()

    def accept_prompt_logprobs(self, chunk: PromptChunk) -> None:
        """Add a chunk's log probabilities; hand them to the stream once the prompt is complete."""
        self._prompt_logprobs.extend(chunk.logprobs)
        candidate_ids, candidate_logprobs = self._prompt_candidates
        candidate_ids.extend(chunk.candidate_ids)
        candidate_logprobs.extend(chunk.candidate_logprobs)
        ids = self.request.input_ids
        if len(self._prompt_logprobs) == len(ids):
            self.wants_prompt_logprobs = False
            prompt = PromptLogprobs(ids, tuple(self._prompt_logprobs), *self._prompt_candidates)
            self._forget_prompt_logprobs()
            self.stream.prompt_logprobs = prompt

    def _forget_prompt_logprobs(self) -> None:
        self._prompt_logprobs = array("f")
        self._prompt_candidates = array("I"), array("f")

    def accept_pooled(self, values: Sequence[float]) -> None:
        """Send what the prompt yields to the stream, which ends."""
        self.stream.pooled = values
        self.stream.token(end_without_token())

    def accept(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> bool:
        """Send the next token to the stream; return whether it is the last one."""
        self.generated_ids.append(token_id)
        self.num_generated = count = len(self.generated_ids)
        text = self._text.step(token_id)
        reason: FinishReason | None = None
        finished: Finished | None = None
        # Runs for every token, so the usual one costs no call.
        may_end = token_id in self._last_ids or count >= self.max_new_tokens
        if may_end or self._stop is not None:
            reason = self._finish_reason(token_id, text)
        if reason is not None:
            text += self._text.flush()
            seed = self.request.sampling.seed if self.request.sampling.samples else None
            finished = Finished(reason, self._text.final_text(), count, seed)
        top_tokens = tuple([self._token(*candidate) for candidate in top]) if top else ()
        token = Token(token_id, text, logprob, self._tokenizer.is_special(token_id))
        self.stream.token(TokenEvent(count, token, top_tokens, finished))
        return finished is not None

    def _finish_reason(self, token_id: int, text: str) -> FinishReason | None:
        """Find the reason in TGI's order: length, end of sequence, stop sequence; a stop token precedes them all."""
        if token_id in self._stop_token_ids:
            return FinishReason.STOP_SEQUENCE
        if self._answer_text is not None:
            text = self._answer_text(text)
        matched = self._stop is not None and self._stop.push(text) is not None
        if self.num_generated >= self.max_new_tokens:
            return FinishReason.LENGTH
        if token_id in self._eos_token_ids:
            return FinishReason.LENGTH if self.is_closed else FinishReason.EOS_TOKEN
        return FinishReason.STOP_SEQUENCE if matched else None

    def _token(self, token_id: int, logprob: float) -> Token:
        tokenizer = self._tokenizer
        return Token(
            token_id, tokenizer.token_text(token_id), logprob, tokenizer.is_special(token_id)
        )


class RecordedEntry(Entry):
    """An entry whose tokens are recorded, and which may have some already."""

    def __init__(self, *arguments: Any, choice: Choice, **options: Any) -> None:  # noqa: ANN401
        """As `Entry`; `choice` records its tokens."""
        super().__init__(*arguments, **options)
        self._choice = choice
        self._expected: Sequence[KnownToken] = ()
        """Known tokens that are computed again."""
        self._num_recorded = 0
        """The number of recorded tokens among them."""
        self._has_begun = choice.beginning is not None

    def resume(self) -> bool:
        request, choice = self.request, self._choice
        if choice.beginning is None:
            return False
        if choice.beginning.check != check_of(request):
            raise NotResumable
        # It has left the queue once, so it has no deadline there.
        self.num_preemptions = 1
        self.stream.batched_at = self.stream.queued_at
        self.stream.cached_tokens = choice.beginning.cached_tokens
        if choice.renders_known and (request.top_n_tokens or request.prefill_logprobs):
            self._expected = choice.known
            return False
        for token in choice.known:
            self.is_closed = token.closed
            if super().accept(token.id, token.logprob, ()):
                return True
        return False

    def record(self, token_id: int, logprob: float) -> None:
        if self._expected and self._is_known(token_id):
            return
        if not self._has_begun:
            self._has_begun = True
            cached_tokens = self.stream.cached_tokens or 0
            self._choice.begin(Beginning(cached_tokens, check_of(self.request)))
        self._choice.token(token_id, logprob, self.is_closed)

    def _is_known(self, token_id: int) -> bool:
        """Return whether the next token is known, and computed again; raises NotResumable if it is another one."""
        number = self._num_recorded
        if number == len(self._expected):
            return False
        self._num_recorded = number + 1
        if self._expected[number].id != token_id:
            raise NotResumable
        return True


def check_of(request: ValidRequest) -> int:
    """Return 64 bits that differ where tokens of one request would not be tokens of the other."""
    sampling, adapter = request.sampling, request.adapter
    digest = blake2b(array("I", request.input_ids).tobytes(), digest_size=8)
    limits = (request.max_new_tokens, sampling.seed, "" if adapter is None else adapter.digest)
    digest.update(repr(limits).encode())
    for span in request.images:
        digest.update(span.image.digest)
    return int.from_bytes(digest.digest())


def new_entry(
    ids: Iterator[int],
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    request: ValidRequest,
    **options: Any,  # noqa: ANN401
) -> Entry:
    """Make the entry of a request with the next id, as `Entry` does; it is recorded if the request has a choice."""
    arguments = (next(ids), request, tokenizer, eos_token_ids)
    if request.choice is None:
        return Entry(*arguments, **options)
    return RecordedEntry(*arguments, choice=request.choice, **options)


def entry_of(request: SchedulableRequest) -> Entry:
    """`request` as what it is in the router."""
    assert isinstance(request, Entry)
    return request
