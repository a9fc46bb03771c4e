"""From what a client wrote to a request that may be trusted: TGI's rules, in TGI's order and words."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.errors import SizeError, ValidationError
from millrace_router.request.grammar import check_as_tgi
from millrace_router.request.limits import Limits
from millrace_router.request.parameters import GenerateParameters, GenerateRequest, OpenAIParameters
from millrace_router.request.prompt import PromptRequest
from millrace_router.request.request import (
    Grammar,
    SamplingParameters,
    SchedulingParameters,
    ValidRequest,
)
from millrace_router.request.scheduling import DEFAULT_SCHEDULING
from millrace_router.request.seeds import random_seed
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer, TokenizerError
from millrace_router.validation.grammar_admission import Grammars

MAX_STOP_CHARS = 4096
"""Longer stop sequences are refused: looking for them would cost more than the token."""

TGI_LEG = 1024
"""New tokens that TGI counts at most, as it generates so many at a time."""


@dataclass(frozen=True, slots=True)
class Validated:
    """A trusted request beside the text it came from, which `return_full_text` repeats."""

    request: ValidRequest
    inputs: str


def check_best_of(parameters: GenerateParameters, limits: Limits) -> None:
    """Check what the route decides for an answer in one piece; raises ValidationError."""
    best_of = parameters.best_of or 1
    if best_of == 1:
        return
    if limits.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise ValidationError(
            f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
        )


def check_stream(parameters: GenerateParameters) -> None:
    """Check what the route decides for a stream; raises ValidationError."""
    if parameters.best_of not in {None, 1}:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise ValidationError(
            "`decoder_input_details` == true is not supported when streaming tokens"
        )


def check_sampling(parameters: GenerateParameters) -> None:
    """Check the ranges of everything that chooses tokens; raises ValidationError."""
    temperature, top_k = parameters.temperature, parameters.top_k
    top_p, typical_p = parameters.top_p, parameters.typical_p
    repetition, frequency = parameters.repetition_penalty, parameters.frequency_penalty
    min_p = parameters.min_p
    samples = (
        parameters.do_sample
        or bool(min_p)
        or any(warper is not None for warper in (temperature, top_k, top_p, typical_p))
    )
    if (parameters.best_of or 1) > 1 and not samples:
        raise ValidationError("you must use sampling when `best_of` is > 1")
    if temperature is not None and temperature <= 0:
        raise ValidationError("`temperature` must be strictly positive")
    if repetition is not None and repetition <= 0:
        raise ValidationError("`repetition_penalty` must be strictly positive")
    if frequency is not None and not -2 <= frequency <= 2:
        raise ValidationError("`frequency_penalty` must be >= -2.0 and <= 2.0")
    if top_p is not None and not 0 < top_p < 1:
        raise ValidationError("`top_p` must be > 0.0 and < 1.0")
    if typical_p is not None and not 0 < typical_p < 1:
        raise ValidationError("`typical_p` must be > 0.0 and < 1.0")
    if top_k is not None and top_k <= 0:
        raise ValidationError("`top_k` must be strictly positive")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValidationError("`min_p` must be >= 0.0 and <= 1.0")


def check_extent(parameters: GenerateParameters, limits: Limits) -> None:
    """Check how much is asked for, as far as that is known without tokens; raises ValidationError."""
    if parameters.max_new_tokens == 0:
        raise ValidationError("`max_new_tokens` must be strictly positive")
    if len(parameters.stop) > limits.max_stop_sequences:
        raise ValidationError(
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. "
            f"Given: {len(parameters.stop)}"
        )
    longest_stop = max(map(len, parameters.stop), default=0)
    if longest_stop > MAX_STOP_CHARS:
        raise ValidationError(
            f"`stop` sequences must have at most {MAX_STOP_CHARS} characters. Given: {longest_stop}"
        )
    if parameters.seed is not None and (parameters.best_of or 1) > 1:
        raise ValidationError("`seed` must not be set when `best_of` > 1")
    top_n = parameters.top_n_tokens
    if top_n is not None and top_n > limits.max_top_n_tokens:
        raise ValidationError(
            f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}"
        )


def check_inputs(request: GenerateRequest, limits: Limits) -> None:
    """Check the text before it is tokenized; raises ValidationError."""
    if not request.inputs:
        raise ValidationError("`inputs` cannot be empty")
    truncate = request.parameters.truncate
    if truncate is not None and not 0 < truncate <= limits.max_input_tokens:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. "
            f"Given: {truncate}"
        )


def new_tokens(input_length: int, asked: int | None, limits: Limits) -> int:
    """Return how many may follow a prompt; raises SizeError."""
    room = max(limits.max_total_tokens - input_length, 0)
    if asked is None:
        asked = room
    if not limits.strict_tgi:
        check_length(input_length, asked, limits)
        return asked
    check_length(input_length, min(asked, TGI_LEG), limits)
    return min(asked, room)


def check_length(input_length: int, max_new_tokens: int, limits: Limits) -> None:
    """Check the request against the context; raises SizeError."""
    if input_length + max_new_tokens > limits.max_total_tokens:
        message = (
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {input_length} `inputs` tokens and {max_new_tokens} `max_new_tokens`"
        )
    elif input_length > limits.max_input_tokens:
        message = (
            f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_length}"
        )
    else:
        return
    raise SizeError(message, num_prompt_tokens=input_length, max_new_tokens=max_new_tokens)


def check_bytes(request: GenerateRequest, limits: Limits, longest_token: int | None) -> None:
    """Refuse what is too long however it is tokenized, before it is; raises SizeError.

    `longest_token` is the most bytes of a prompt that one token stands for, None where that has no bound.
    """
    if longest_token is None or request.parameters.truncate is not None:
        return
    num_bytes = len(request.inputs.encode(errors="surrogatepass"))
    least = -(-num_bytes // longest_token)
    if least > limits.max_input_tokens:
        raise SizeError(
            f"`inputs` must have less than {limits.max_input_tokens} tokens. "
            f"Given: at least {least}",
            num_prompt_tokens=least,
            max_new_tokens=request.parameters.max_new_tokens or 0,
        )


def check_vocabulary(input_ids: tuple[int, ...], limits: Limits) -> None:
    """Check that the model knows what the tokenizer made of the text; raises ValidationError."""
    highest = max(input_ids)
    if highest >= limits.vocab_size:
        raise ValidationError(
            f"`inputs` contains token id {highest}, but the model knows only {limits.vocab_size}"
        )


def check_bias(parameters: GenerateParameters, limits: Limits) -> None:
    """Check that the model knows the tokens that are to be more or less likely; raises ValidationError."""
    bias = parameters.logit_bias if isinstance(parameters, OpenAIParameters) else ()
    highest = max((id_ for id_, _ in bias), default=0)
    if highest >= limits.vocab_size:
        raise ValidationError(
            f"`logit_bias` contains token id {highest}, but the model knows only {limits.vocab_size}"
        )


async def grammar_from(
    parameters: GenerateParameters, limits: Limits, tokenizer: Tokenizer
) -> Grammar | None:
    """Read the grammar in a thread of `tokenizer`, because a large one takes 10 ms; raises ValidationError."""
    if parameters.grammar is None:
        return None
    if not limits.grammars:
        raise ValidationError("grammar is not supported")
    grammar = await tokenizer.in_thread(parameters.grammar.resolved)
    # A grammar of tools is not the client's, and what its `response_format` says is checked before that.
    if limits.strict_tgi and not isinstance(parameters, OpenAIParameters):
        check_as_tgi(parameters.grammar)
    if parameters.ignore_eos:
        raise ValidationError("`ignore_eos` has no meaning beside a grammar, which says what ends")
    return grammar


def check_least(parameters: GenerateParameters, max_new_tokens: int) -> int:
    """Tokens that are to come at least; raises ValidationError if they are more than may come."""
    least = parameters.min_new_tokens or 0
    if least > max_new_tokens:
        if isinstance(parameters, OpenAIParameters):
            names = "`min_tokens` must be <= `max_tokens`"
        else:
            names = "`min_new_tokens` must be <= `max_new_tokens`"
        raise ValidationError(f"{names}. Given: {least} and {max_new_tokens}")
    return least


def check_adapter(parameters: GenerateParameters, limits: Limits) -> None:
    """Refuse what TGI ignores in silence, an adapter that is not there; raises ValidationError."""
    if parameters.adapter_id is not None and not limits.strict_tgi:
        raise ValidationError(f"`adapter_id` is not known. Given: {parameters.adapter_id}")


def sampling_from(parameters: GenerateParameters) -> SamplingParameters:
    """Resolve the defaults; a seed is drawn where none is given."""
    openai = parameters if isinstance(parameters, OpenAIParameters) else OpenAIParameters()
    return SamplingParameters(
        temperature=_default(parameters.temperature, 1.0),
        top_k=parameters.top_k or 0,
        top_p=_default(parameters.top_p, 1.0),
        typical_p=_default(parameters.typical_p, 1.0),
        do_sample=parameters.do_sample,
        seed=random_seed() if parameters.seed is None else parameters.seed,
        repetition_penalty=_default(parameters.repetition_penalty, 1.0),
        frequency_penalty=_default(parameters.frequency_penalty, 0.0),
        presence_penalty=openai.presence_penalty,
        openai_frequency_penalty=openai.openai_frequency_penalty,
        min_p=_default(parameters.min_p, 0.0),
        watermark=parameters.watermark,
        bias=openai.logit_bias,
    )


def scores_from(parameters: GenerateParameters, limits: Limits) -> tuple[bool, int]:
    """Whether the prompt's log probabilities are told, and how many candidates beside each of them."""
    if isinstance(parameters, OpenAIParameters) and parameters.prompt_logprobs:
        return True, parameters.prompt_top_n_tokens
    return parameters.decoder_input_details and limits.prefill_logprobs, 0


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


class Validator:
    """Checks requests and tokenizes them off the event loop."""

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, metrics: Metrics, grammars: Grammars
    ) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._grammars = grammars

    async def validate(
        self,
        request: GenerateRequest,
        *,
        scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
        add_special_tokens: bool = True,
    ) -> Validated:
        """Check, as `check` does, a request that is to be generated, and count what it asks for.

        A grammar that is new is compiled by the shards, which are waited for. Raises RouterError.
        """
        input_ids, max_new_tokens = await self._measure(
            request, add_special_tokens=add_special_tokens
        )
        self._metrics.request_input_length.observe(len(input_ids))
        validated = await self._trusted(request, scheduling, input_ids, max_new_tokens)
        grammar = validated.request.grammar
        if grammar is not None:
            await self._grammars.check(grammar, wait_seconds=scheduling.max_queue_seconds)
        self._metrics.request_max_new_tokens.observe(max_new_tokens)
        return validated

    async def check(
        self,
        request: GenerateRequest,
        *,
        scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
        add_special_tokens: bool = True,
    ) -> Validated:
        """Check everything that depends neither on the route nor on the shards, which compile grammars.

        Raises:
            SizeError: it is well-formed, but too long.
            ValidationError: with the first rule that is broken.

        """
        input_ids, max_new_tokens = await self._measure(
            request, add_special_tokens=add_special_tokens
        )
        return await self._trusted(request, scheduling, input_ids, max_new_tokens)

    async def _measure(
        self, request: GenerateRequest, *, add_special_tokens: bool
    ) -> tuple[tuple[int, ...], int]:
        """Check everything up to the length; returns the prompt's tokens and how many may follow."""
        parameters, limits = request.parameters, self.limits
        check_sampling(parameters)
        check_extent(parameters, limits)
        check_bias(parameters, limits)
        if isinstance(request, PromptRequest) and request.input_ids is not None:
            input_ids = request.input_ids
        else:
            check_inputs(request, limits)
            check_bytes(request, limits, self._tokenizer.longest_token)
            input_ids = await self._encode(request.inputs, add_special_tokens=add_special_tokens)
        if parameters.truncate is not None:
            input_ids = input_ids[-parameters.truncate :]
        max_new_tokens = new_tokens(len(input_ids), parameters.max_new_tokens, limits)
        check_vocabulary(input_ids, limits)
        return input_ids, max_new_tokens

    async def _trusted(
        self,
        request: GenerateRequest,
        scheduling: SchedulingParameters,
        input_ids: tuple[int, ...],
        max_new_tokens: int,
    ) -> Validated:
        """Check what is left, and resolve the defaults; raises ValidationError."""
        parameters, limits = request.parameters, self.limits
        grammar = await grammar_from(parameters, limits, self._tokenizer)
        scores, candidates = scores_from(parameters, limits)
        least = check_least(parameters, max_new_tokens)
        check_adapter(parameters, limits)
        valid = ValidRequest(
            input_ids=input_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling_from(parameters),
            stop_sequences=tuple(parameters.stop),
            ignore_eos=parameters.ignore_eos,
            min_new_tokens=least,
            top_n_tokens=parameters.top_n_tokens or 0,
            prefill_logprobs=scores,
            prompt_top_n_tokens=candidates,
            grammar=grammar,
            scheduling=scheduling,
        )
        return Validated(valid, request.inputs)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Split `text` into tokens with their places in it, as a JSON array; raises ValidationError."""
        try:
            return await self._tokenizer.spans_json_async(
                text, add_special_tokens=add_special_tokens
            )
        except TokenizerError as error:
            raise ValidationError(f"tokenizer error {error}") from error

    async def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        """Count the tokens of a text, however long it is; raises ValidationError."""
        return len(await self._encode(text, add_special_tokens=add_special_tokens))

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            input_ids = await self._tokenizer.encode_async(
                text, add_special_tokens=add_special_tokens
            )
        except TokenizerError as error:
            raise ValidationError(f"tokenizer error {error}") from error
        if not input_ids:
            raise ValidationError("`inputs` cannot be empty")
        return input_ids
