"""Makes a trusted request of a client's request: TGI's rules, in TGI's order."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TypeVar

from millrace_proto.sampling import NO_RULES, Dry, SequenceRules
from millrace_router.errors import ValidationError
from millrace_router.request.generation_request import DryRequest, GenerationRequest
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.images import ImageSpan, spans_of
from millrace_router.request.limits import Limits
from millrace_router.request.request import Grammar, Task, ValidRequest
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer, TokenizerError
from millrace_router.validation import rules
from millrace_router.validation.grammar_admission import GrammarAdmission
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults

MAX_BAD_WORDS = 64
MAX_WORD_CHARS = 256
MAX_BREAKERS = 16
MAX_DRY_WINDOW = 1 << 20

Made = TypeVar("Made")


def has_rules(request: GenerationRequest) -> bool:
    """Return whether the request has any rule."""
    return bool(request.allowed_token_ids or request.bad_words or request.dry)


def rules_of(request: GenerationRequest, tokenizer: Tokenizer, vocab_size: int) -> SequenceRules:
    """Check the rules, and find their tokens; raises ValidationError."""
    highest = max(request.allowed_token_ids, default=0)
    if highest >= vocab_size:
        raise ValidationError(
            f"`allowed_token_ids` contains token id {highest}, but the model knows only {vocab_size}"
        )
    return SequenceRules(
        allowed_ids=tuple(sorted(set(request.allowed_token_ids))),
        bad_words=_bad_words(request.bad_words, tokenizer),
        dry=None if request.dry is None else _dry(request.dry, tokenizer, vocab_size),
    )


def _bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the start of a text, and after a blank, each passage once."""
    if len(words) > MAX_BAD_WORDS or max(map(len, words), default=0) > MAX_WORD_CHARS:
        raise ValidationError(
            f"`bad_words` supports up to {MAX_BAD_WORDS} words of at most {MAX_WORD_CHARS} characters"
        )
    return tuple(dict.fromkeys(ids for word in words for ids in _spellings(word, tokenizer)))


def _spellings(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    bare = word.lstrip(" ")
    if not bare:
        raise ValidationError("`bad_words` must not be blank")
    try:
        for text in (bare, f" {bare}"):
            yield tokenizer.encode(text, add_special_tokens=False)
    except TokenizerError as error:
        raise ValidationError(f"tokenizer error {error}") from error


def _dry(request: DryRequest, tokenizer: Tokenizer, vocab_size: int) -> Dry:
    if not (0 <= request.multiplier < math.inf and 0 <= request.base < math.inf):
        raise ValidationError("`dry_multiplier` and `dry_base` must be >= 0.0")
    if len(request.breakers) > MAX_BREAKERS or not all(request.breakers):
        raise ValidationError(
            f"`dry_sequence_breakers` supports up to {MAX_BREAKERS} texts, none of them empty"
        )
    return Dry(
        multiplier=request.multiplier,
        base=request.base,
        allowed_length=request.allowed_length,
        window=min(request.window, MAX_DRY_WINDOW),
        breakers=tokenizer.ids_with(request.breakers, vocab_size),
    )


@dataclass(frozen=True, slots=True)
class Validated:
    """A trusted request and the text it came from, which `return_full_text` repeats."""

    request: ValidRequest
    inputs: str


class Validator:
    """Checks requests and tokenizes them off the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        metrics: Metrics,
        grammars: GrammarAdmission,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        """`defaults` are the model's own, for requests that have left something out."""
        self.limits = limits
        self.defaults = defaults
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._grammars = grammars
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def validate(self, request: GenerationRequest) -> Validated:
        """Check a request that is to be generated, and count its lengths in the metrics.

        The shards compile its grammar first, unless they have it. Raises RouterError.
        """
        request = self.defaults.fill(request)
        input_ids, max_new_tokens = await self._measure(request)
        self._metrics.request_input_length.observe(len(input_ids))
        validated = await self._trusted(request, input_ids, max_new_tokens)
        grammar = validated.request.grammar
        if grammar is not None:
            await self._grammars.check(grammar, wait_seconds=request.scheduling.max_queue_seconds)
        self._metrics.request_max_new_tokens.observe(max_new_tokens)
        return validated

    async def check(self, request: GenerationRequest) -> Validated:
        """Check everything that depends neither on the route nor on the shards.

        Raises:
            SizeError: the request is well-formed, but too long.
            ValidationError: the request breaks a rule; the message is the first one's.

        """
        request = self.defaults.fill(request)
        return await self._trusted(request, *await self._measure(request))

    async def _measure(self, request: GenerationRequest) -> tuple[tuple[int, ...], int]:
        """Check everything up to the length; returns the prompt's tokens and how many may follow."""
        limits = self.limits
        task = Task.GENERATE if request.pooling is None else request.pooling.task
        rules.check_task(task, limits)
        rules.check_sampling(request)
        rules.check_extent(request, limits)
        rules.check_bias(request, limits)
        rules.check_stop_tokens(request, limits)
        if isinstance(request.prompt, str):
            rules.check_text(request, limits, self._tokenizer.longest_token)
            input_ids = await self._encode(request)
        else:
            rules.check_truncate(request, limits)
            input_ids = request.prompt
        if request.truncate is not None:
            kept = rules.num_kept(request, limits)
            if request.images and len(input_ids) > kept:
                raise ValidationError(f"`{request.names.truncate}` would cut a prompt with images")
            input_ids = input_ids[-kept:]
        max_new_tokens = rules.new_tokens(
            request, len(input_ids), limits, self.defaults.most_tokens(request)
        )
        rules.check_vocabulary(request, input_ids, limits)
        return input_ids, max_new_tokens

    async def _trusted(
        self, request: GenerationRequest, input_ids: tuple[int, ...], max_new_tokens: int
    ) -> Validated:
        """Check the rest, and resolve the defaults; raises ValidationError."""
        grammar = await self._read_grammar(request)
        sequence_rules = await self._sequence_rules(request)
        least = rules.least_tokens(request, max_new_tokens)
        images = self._image_spans(request, input_ids)
        allowed = request.decoder_input_details and self.limits.prefill_logprobs
        valid = ValidRequest(
            input_ids=input_ids,
            images=images,
            max_new_tokens=max_new_tokens,
            sampling=rules.sampling_from(request, sequence_rules),
            stop_sequences=request.stop,
            answer_text=request.answer_text,
            ignore_eos=request.ignore_eos,
            stop_token_ids=tuple(sorted(set(request.stop_token_ids))),
            cache_salt=self._cache_salt(request, input_ids, images),
            min_new_tokens=least,
            top_n_tokens=request.top_n_tokens or 0,
            prefill_logprobs=request.prompt_logprobs or allowed,
            prompt_top_n_tokens=request.prompt_top_n_tokens,
            grammar=grammar,
            scheduling=request.scheduling,
            pooling=request.pooling,
        )
        return Validated(valid, request.text)

    def _cache_salt(
        self,
        request: GenerationRequest,
        input_ids: tuple[int, ...],
        images: tuple[ImageSpan, ...],
    ) -> tuple[str, ...]:
        """Return the salt of the blocks' keys, which covers the prompt if all of its KV depends on all of it."""
        if not self.limits.whole_prompts:
            return request.cache_salt
        prompt = sha256(array("I", input_ids).tobytes())
        for span in images:
            prompt.update(span.image.digest)
        return (*request.cache_salt, prompt.hexdigest())

    def _image_spans(
        self, request: GenerationRequest, input_ids: tuple[int, ...]
    ) -> tuple[ImageSpan, ...]:
        """Find the placeholders of pictures; raises ValidationError for one that the client wrote."""
        placeholder = self.limits.image_token_id
        if placeholder is None:
            return ()
        if request.images:
            return spans_of(input_ids, placeholder, request.images)
        if placeholder in input_ids:
            raise ValidationError(
                f"`{request.names.prompt}` has the placeholder of an image, but no image"
            )
        return ()

    async def _sequence_rules(self, request: GenerationRequest) -> SequenceRules:
        if not has_rules(request):
            return NO_RULES
        return await self._tokenizer.in_thread(
            partial(rules_of, request, self._tokenizer, self.limits.vocab_size)
        )

    async def _read_grammar(self, request: GenerationRequest) -> Grammar | None:
        grammar = request.grammar
        if grammar is None:
            return None
        if not self.limits.grammars:
            raise ValidationError("grammar is not supported")
        if isinstance(grammar, RawGrammar):
            raw = grammar
            grammar = await self.make_grammar(raw.read)
            if self.limits.dialect.needs_properties:
                raw.check_as_tgi()
        if request.ignore_eos:
            raise ValidationError(
                "`ignore_eos` has no meaning with a grammar, which decides where a text ends"
            )
        return grammar

    async def make_grammar(self, make: Callable[[], Made]) -> Made:
        """Read or write a grammar in a thread for nothing else: one may take 0.1 s, and prompts do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._grammar_thread, make)

    async def tokenize(self, text: str, *, adds_special_tokens: bool = True) -> bytes:
        """Split `text` into tokens with their places in it, as a JSON array; raises ValidationError."""
        try:
            return await self._tokenizer.spans_json_async(
                text, add_special_tokens=adds_special_tokens
            )
        except TokenizerError as error:
            raise ValidationError(f"tokenizer error {error}") from error

    async def count(self, request: GenerationRequest) -> int:
        """Count the tokens of a prompt that is a text of any length; raises ValidationError."""
        return len(await self._encode(request))

    async def _encode(self, request: GenerationRequest) -> tuple[int, ...]:
        try:
            input_ids = await self._tokenizer.encode_async(
                request.text, add_special_tokens=request.adds_special_tokens
            )
        except TokenizerError as error:
            raise ValidationError(f"tokenizer error {error}") from error
        if not input_ids:
            raise ValidationError(f"`{request.names.prompt}` cannot be empty")
        return input_ids
