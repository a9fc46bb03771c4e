"""The rules for requests that need neither the tokenizer nor the shards, in TGI's words."""

from __future__ import annotations

from millrace_proto.sampling import NO_RULES, Sampling, SequenceRules
from millrace_router.errors import SizeError, ValidationError, WrongTask
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.limits import Limits
from millrace_router.request.request import Task, random_seed

MAX_STOP_CHARS = 4096
"""Longer stop sequences are refused: the search for them would cost more than the token."""
FITTING = -1
"""The value of `truncate` that keeps as many tokens as fit."""
CHAT_NEW_TOKENS = 2048
"""Most new tokens of a chat for which neither the client nor the server nor the model names a limit."""
TGI_LEG = 1024
"""TGI generates at most this many tokens at a time, and counts no more against the context."""


def check_best_of(request: GenerationRequest, limits: Limits) -> None:
    """Check `best_of` of an answer in one piece; raises ValidationError."""
    best_of = request.best_of or 1
    if best_of == 1:
        return
    if limits.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise ValidationError(
            f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
        )


def check_stream(request: GenerationRequest) -> None:
    """Refuse what a stream cannot have; raises ValidationError."""
    if request.best_of not in {None, 1}:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if request.decoder_input_details:
        raise ValidationError(
            "`decoder_input_details` == true is not supported when streaming tokens"
        )


_DOES = {
    Task.GENERATE: "does not generate text",
    Task.EMBED: "does not compute embeddings",
    Task.SCORE: "does not compute scores",
}


def check_task(task: Task, limits: Limits) -> None:
    """Check that the server has the task; raises WrongTask."""
    if task not in limits.tasks:
        own = ",".join(sorted(limits.tasks))
        raise WrongTask(
            f"This server {_DOES[task]}: its model runs with `--task {own}`, and this request needs `--task {task}`"
        )


def check_sampling(request: GenerationRequest) -> None:
    """Check the ranges of the sampling parameters; raises ValidationError."""
    if (request.best_of or 1) > 1 and not (request.do_sample or request.has_warpers()):
        raise ValidationError("you must use sampling when `best_of` is > 1")
    if (refusal := request.refusal()) is not None:
        raise ValidationError(refusal)


def check_extent(request: GenerationRequest, limits: Limits) -> None:
    """Check the counts that do not depend on the prompt's tokens; raises ValidationError."""
    names = request.names
    if request.max_new_tokens == 0:
        raise ValidationError(f"`{names.max_new_tokens}` must be strictly positive")
    if len(request.stop) > limits.max_stop_sequences:
        raise ValidationError(
            f"`{names.stop}` supports up to {limits.max_stop_sequences} stop sequences. "
            f"Given: {len(request.stop)}"
        )
    longest_stop = max(map(len, request.stop), default=0)
    if longest_stop > MAX_STOP_CHARS:
        raise ValidationError(
            f"`{names.stop}` sequences must have at most {MAX_STOP_CHARS} characters. "
            f"Given: {longest_stop}"
        )
    if request.seed is not None and (request.best_of or 1) > 1:
        raise ValidationError("`seed` must not be set when `best_of` > 1")
    top_n = request.top_n_tokens
    most = max(limits.max_top_n_tokens, request.top_n_allowed)
    if top_n is not None and top_n > most:
        raise ValidationError(f"`{names.top_n_tokens}` must be >= 0 and <= {most}. Given: {top_n}")


def check_bias(request: GenerationRequest, limits: Limits) -> None:
    """Check that the model has the tokens of `logit_bias`; raises ValidationError."""
    highest = max((id_ for id_, _ in request.logit_bias), default=0)
    if highest >= limits.vocab_size:
        raise ValidationError(
            f"`logit_bias` contains token id {highest}, but the model knows only {limits.vocab_size}"
        )


def check_stop_tokens(request: GenerationRequest, limits: Limits) -> None:
    """Check that the model has the tokens that end the answer; raises ValidationError."""
    highest = max(request.stop_token_ids, default=0)
    if highest >= limits.vocab_size:
        raise ValidationError(
            f"`stop_token_ids` contains token id {highest}, "
            f"but the model knows only {limits.vocab_size}"
        )


def check_text(request: GenerationRequest, limits: Limits, longest_token: int | None) -> None:
    """Check a prompt that is a text before it is tokenized, and refuse it if it is too long in any case.

    `longest_token` is the most bytes of a prompt that one token stands for, None without a bound.

    Raises:
        SizeError: the prompt is too long.
        ValidationError: the prompt is empty, or `truncate` is out of range.

    """
    name = request.names.prompt
    if not request.prompt:
        raise ValidationError(f"`{name}` cannot be empty")
    check_truncate(request, limits)
    max_input_tokens = limits.max_input_tokens
    if longest_token is None or request.truncate is not None:
        return
    num_bytes = len(request.text.encode(errors="surrogatepass"))
    least = -(-num_bytes // longest_token)
    if least > max_input_tokens:
        raise SizeError(
            f"`{name}` must have less than {max_input_tokens} tokens. Given: at least {least}",
            num_prompt_tokens=least,
            max_new_tokens=request.max_new_tokens or 0,
            max_prompt_tokens=limits.max_prompt_tokens,
        )


def check_truncate(request: GenerationRequest, limits: Limits) -> None:
    """Check `truncate`; raises ValidationError."""
    truncate, most = request.truncate, limits.max_input_tokens
    if truncate is not None and truncate != FITTING and not 0 < truncate <= most:
        raise ValidationError(
            f"`{request.names.truncate}` must be strictly positive and less than {most}. "
            f"Given: {truncate}"
        )


def num_kept(request: GenerationRequest, limits: Limits) -> int:
    """Return how many of the prompt's last tokens `truncate`, which is set and checked, keeps."""
    if request.truncate != FITTING:
        return request.truncate or limits.max_input_tokens
    most = request.max_new_tokens or 1
    if most >= limits.max_total_tokens and _is_bound(request, limits):
        most = 1
    return max(1, min(limits.max_input_tokens, limits.max_total_tokens - most))


def _is_bound(request: GenerationRequest, limits: Limits) -> bool:
    """Return whether `max_new_tokens` only bounds the answer, so that it may be more than fits."""
    is_strict = limits.strict_max_tokens or limits.dialect.clamps_new_tokens
    return request.is_chat and not is_strict


def new_tokens(
    request: GenerationRequest, input_length: int, limits: Limits, default: int | None = None
) -> int:
    """Return how many tokens may follow a prompt of `input_length` tokens; raises SizeError.

    A request that leaves it open gets as many as fit, no more than the server's default or else the model's, `default`,
    or else a chat's, and no more than the server's limit.
    """
    room = max(limits.max_total_tokens - input_length, 0)
    if request.pooling is not None:
        _check_pooled(request, input_length, limits.max_prompt_tokens)
        return 1
    num_tokens, most = request.max_new_tokens, limits.max_new_tokens_limit
    clamps, is_bound = limits.dialect.clamps_new_tokens, _is_bound(request, limits)
    if num_tokens is None:
        of_chat = CHAT_NEW_TOKENS if request.is_chat and not clamps else None
        bounds = (room, limits.default_max_new_tokens or default or of_chat, most)
        num_tokens = min(bound for bound in bounds if bound is not None)
    elif most is not None and num_tokens > most:
        if not (clamps or is_bound):
            raise SizeError(
                f"`{request.names.max_new_tokens}` must be <= {most}. Given: {num_tokens}",
                num_prompt_tokens=input_length,
                max_new_tokens=num_tokens,
            )
        num_tokens = most
    if is_bound:
        num_tokens = min(num_tokens, max(room, 1))
    if not clamps:
        _check_length(request, input_length, num_tokens, limits)
        return num_tokens
    _check_length(request, input_length, min(num_tokens, TGI_LEG), limits)
    return min(num_tokens, room)


def _check_pooled(request: GenerationRequest, input_length: int, most: int) -> None:
    if input_length > most:
        raise SizeError(
            f"`{request.names.prompt}` must have at most {most} tokens each, or be truncated. Given: {input_length}",
            num_prompt_tokens=input_length,
            max_new_tokens=0,
        )


def _check_length(
    request: GenerationRequest, input_length: int, max_new_tokens: int, limits: Limits
) -> None:
    prompt, new = request.names.prompt, request.names.max_new_tokens
    if input_length + max_new_tokens > limits.max_total_tokens:
        message = (
            f"`{prompt}` tokens + `{new}` must be <= {limits.max_total_tokens}. "
            f"Given: {input_length} `{prompt}` tokens and {max_new_tokens} `{new}`"
        )
    elif input_length > limits.max_input_tokens:
        message = (
            f"`{prompt}` must have less than {limits.max_input_tokens} tokens. "
            f"Given: {input_length}"
        )
    else:
        return
    raise SizeError(
        message,
        num_prompt_tokens=input_length,
        max_new_tokens=max_new_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
    )


def check_vocabulary(
    request: GenerationRequest, input_ids: tuple[int, ...], limits: Limits
) -> None:
    """Check that the model has the prompt's tokens; raises ValidationError."""
    highest = max(input_ids)
    if highest >= limits.vocab_size:
        raise ValidationError(
            f"`{request.names.prompt}` contains token id {highest}, "
            f"but the model knows only {limits.vocab_size}"
        )


def least_tokens(request: GenerationRequest, max_new_tokens: int) -> int:
    """Return the least number of new tokens; raises ValidationError if it exceeds `max_new_tokens`."""
    least, names = request.min_new_tokens or 0, request.names
    if least > max_new_tokens:
        raise ValidationError(
            f"`{names.least_tokens}` must be <= `{names.most_tokens}`. "
            f"Given: {least} and {max_new_tokens}"
        )
    return least


def sampling_from(request: GenerationRequest, rules: SequenceRules = NO_RULES) -> Sampling:
    """Resolve the defaults; a request without any seed gets a random one."""
    chosen = request.chosen()
    seed = request.unset_seed if request.seed is None else request.seed
    if not request.xtc_probability:
        del chosen["xtc_threshold"]
    return Sampling(
        **chosen,
        do_sample=request.do_sample,
        seed=random_seed() if seed is None else seed,
        presence_penalty=request.presence_penalty,
        openai_frequency_penalty=request.openai_frequency_penalty,
        watermark=request.watermark,
        bias=request.logit_bias,
        rules=rules,
    )
