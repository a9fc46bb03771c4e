"""OpenAI's requests for chats and text completions as strict models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field, model_validator

from millrace_router.api.body.adapters import adapter_of_model, lorax_headers
from millrace_router.api.body.fields import (
    FieldScope,
    Float32,
    Items,
    Messages,
    Prompt,
    RequestModel,
    Tools,
    UInt32,
    prompts_of,
)
from millrace_router.api.body.grammars import ResponseFormat
from millrace_router.api.body.messages import (
    ChatMessage,
    ToolChoiceField,
    ToolDefinition,
    as_tools,
    check_exclusive,
    choose,
    for_template,
    foreign_in,
    without_functions,
)
from millrace_router.api.body.sampling import (
    TOP_LOGPROBS,
    GuidedFields,
    SamplingFields,
    biases_from,
    openai_generation,
)
from millrace_router.api.chat.chat import Chat
from millrace_router.errors import BatchSizeExceeded, SuffixNotSupported, ValidationError
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.limits import Dialect, Limits
from millrace_router.server.services import Services

LORAX_FIELDS = frozenset({"adapter_source", "api_token"})
"""Fields that LoRAX has and OpenAI lacks."""
OLD_CLIENTS_FIELDS = frozenset(
    {"model", "messages", "repetition_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"}
    | {"max_tokens", "n", "presence_penalty", "stream", "seed", "temperature", "top_p", "tools", "tool_choice"}
)  # fmt: skip
"""What TGI's old clients, `text-generation` and `tgi`, send with every chat, as null if need be."""


def check_prompt_logprobs(num_logprobs: int | None, limits: Limits, *, stream: bool) -> None:
    """Check the number of candidates; raises ValidationError."""
    if num_logprobs is None:
        return
    if not 0 <= num_logprobs <= limits.max_top_n_tokens:
        raise ValidationError(
            f"`prompt_logprobs` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {num_logprobs}"
        )
    if stream:
        raise ValidationError("`prompt_logprobs` is not supported when streaming tokens")


class Reasoning(RequestModel):
    """How much the model is to think."""

    effort: str | None = None
    enabled: bool | None = None
    """OpenRouter's: false requests an answer without a thought."""
    max_tokens: UInt32 | None = None
    """OpenRouter's name of `thinking_token_budget`, which beats it."""
    exclude: bool | None = None
    """OpenRouter's: whether the answer lacks the thought."""


class ReasoningFields(RequestModel):
    """Fields of chats; null means absent."""

    reasoning_effort: str | None = None
    """How much the model is to think. Range: `none`, `minimal`, `low`, `medium`, `high`, or what its template knows.
    Default: the template's.
    """
    reasoning: Reasoning | None = None
    """OpenRouter's form of what the model is to think. Range: an object with `effort`, `enabled`, `max_tokens` and
    `exclude`. Default: none.
    """
    thinking_token_budget: UInt32 | None = None
    """Tokens after which a thought is closed. Range: 0 or more. Default: no budget."""
    include_reasoning: bool | None = None
    """Whether the answer has the thought. Range: true or false. Default: true."""
    separate_reasoning: bool | None = None
    """Whether the thought is kept apart from the text. Range: true or false. Default: true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as `enable_thinking`. Range: an object. Default: none."""

    @property
    def effort(self) -> str | None:
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort or reasoning.effort
        return "none" if effort is None and reasoning.enabled is False else effort

    @property
    def thinking_budget(self) -> int | None:
        """Tokens after which the thought is closed."""
        other = None if self.reasoning is None else self.reasoning.max_tokens
        return other if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def shows_thought(self) -> bool:
        excluded = self.reasoning is not None and self.reasoning.exclude
        return not excluded and self.include_reasoning is not False


class StreamOptions(RequestModel):
    """The contents of a stream besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Not in OpenAI's: whether each chunk has the usage of its choice so far."""


class CommonRequest(SamplingFields, GuidedFields):
    """Fields that both routes have; null means absent throughout."""

    model: str | None = None
    """The model by one of its names, or a LoRA adapter. Range: any name. Default: the served model."""
    max_tokens: UInt32 | None = None
    """Most tokens of the answer. Range: 1 to what the context leaves, or to `--max-new-tokens-limit`; 0 in completions
    with `echo`. Default: `--default-max-new-tokens`, otherwise the model's own, otherwise what the context leaves.
    """
    stream: bool | None = None
    """Whether the answer comes in pieces, as events. Range: true or false. Default: false."""
    stream_options: StreamOptions | None = None
    """Contents of a stream besides text, such as `include_usage`. Range: an object. Default: none."""
    n: int | None = None
    """Number of answers to the same prompt. Range: 1 to `--max-n`. Default: 1."""
    logit_bias: dict[str, Any] | Annotated[list[Any], Field(max_length=0)] | None = None
    """Adds a value to the scores of tokens, by their ids as text. Range: -100 to 100 each; at most 300 tokens.
    Default: none.
    """
    response_format: ResponseFormat | None = None
    """Form of the answer: any text, JSON, JSON of a schema, a regular expression or a grammar. Range: an object with
    `type`. Default: any text.
    """
    typical_p: Float32 | None = None
    """Draws from the tokens whose information is nearest to the expected one, up to this mass. Range: above 0 to 1; 1
    is off. Default: 1.
    """
    adapter_source: str | None = None
    """Where the adapter in `model` is. Range: `hub` or `local`. Default: `--adapter-source`."""
    api_token: str | None = Field(default=None, repr=False)
    """The client's own token for the hub. Range: any text. Default: none."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its special tokens around the prompt. Range: true or false. Default: false in a chat,
    true for a text.
    """
    return_token_ids: bool | None = None
    """Whether the answer has the ids of its tokens and of the prompt's. Range: true or false. Default: false."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name a token by its id, as in `token_id:5`. Range: true or false. Default: false."""
    prompt_logprobs: int | None = None
    """Likeliest tokens next to the log probability of each token of the prompt; not in streams. Range: 0 to `--max-top-
    n-tokens`. Default: none.
    """
    lora_path: str | None = None
    """The name of a registered adapter, as in SGLang. Range: any name. Default: none."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a separate chunk for usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage of its choice so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def has_token_ids(self) -> bool:
        """Whether the answer has the ids of tokens."""
        return bool(self.return_token_ids)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def adapter(self, request: web.Request) -> AdapterReference | None:
        """Return the adapter that the body names; None for the base model. Raises RouterError."""
        return adapter_of_model(
            request,
            self.model,
            lora_path=self.lora_path,
            source=self.adapter_source,
            token=self.api_token,
        )

    def lorax_headers(self, services: Services, adapter: AdapterReference | None) -> dict[str, str]:
        """Return LoRAX's headers for an answer of `adapter` if the request has one of its fields."""
        if LORAX_FIELDS.isdisjoint(self.model_fields_set):
            return {}
        return lorax_headers(services, adapter)

    def check(self, limits: Limits) -> None:
        """Check the fields that TGI ignores; raises RouterError."""
        if not 0 < self.num_choices <= limits.max_n:
            raise ValidationError(f"`n` must be > 0 and <= {limits.max_n}. Given: {self.n}")
        check_prompt_logprobs(self.prompt_logprobs, limits, stream=bool(self.stream))

    def generation(self, dialect: Dialect) -> GenerationRequest:
        """Translate, without a prompt; raises ValidationError."""
        grammar = self.guide(None if self.response_format is None else self.response_format.raw())
        request = replace(
            self.sampling(dialect),
            typical_p=self.typical_p,
            logit_bias=biases_from(self.logit_bias) if isinstance(self.logit_bias, dict) else (),
            grammar=grammar,
            max_new_tokens=self.max_tokens,
            prompt_logprobs=self.prompt_logprobs is not None,
            prompt_top_n_tokens=self.prompt_logprobs or 0,
        )
        return openai_generation(request, dialect)


class ChatCompletionRequest(ReasoningFields, CommonRequest):
    """Body of `/v1/chat/completions` and `/chat_tokenize`."""

    scope = FieldScope.CHAT

    messages: Messages[ChatMessage] = Field(min_length=1)
    """The conversation, the oldest turn first. Range: 1 turn or more, each with `role` and `content`. Default: none,
    it is required.
    """
    max_completion_tokens: UInt32 | None = None
    """The newer name of `max_tokens`, which it beats. Range: as of `max_tokens`. Default: `max_tokens`."""
    logprobs: bool | None = None
    """Whether the answer has the log probability of each token. Range: true or false. Default: false."""
    top_logprobs: UInt32 | None = None
    """Likeliest tokens next to each token; needs `logprobs`. Range: 0 to 20, or to `--max-top-n-tokens` if that is
    more. Default: 0.
    """
    tools: Tools[ToolDefinition] | None = None
    """Functions that the model may call. Range: a list of functions. Default: none."""
    tool_choice: ToolChoiceField | None = None
    """Whether the model calls a function, and which. Range: `auto`, `none`, `required`, or a function. Default:
    `auto`.
    """
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Range: true or false. Default: true."""
    tool_prompt: str | None = None
    """Text after the last message if there are tools. Range: any text. Default: none if the template lists the tools
    itself, otherwise TGI's.
    """
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of the assistant's turn. Range: true or false. Default: true, unless
    the last turn is the assistant's.
    """
    continue_final_message: bool | None = None
    """Whether the answer goes on with the last turn. Range: true or false. Default: true if the last turn is the
    assistant's.
    """
    documents: Items[dict[str, Any]] | None = None
    """Documents for chat templates that know them. Range: a list of objects. Default: none."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_functions(cls, value: object) -> object:
        return without_functions(value, functions="tools", function_call="tool_choice")

    @property
    def is_of_old_client(self) -> bool:
        """Whether one of TGI's old clients sent it; they read chunks only as `OldDeltaJson`."""
        return self.model == "tgi" and self.model_fields_set >= OLD_CLIENTS_FIELDS

    def left_out(self) -> Iterator[str]:
        for message in self.messages:
            yield from (f"messages.{type_}" for type_ in foreign_in(message.content))

    def check(self, limits: Limits) -> None:
        """Check the fields that TGI ignores; raises RouterError."""
        super().check(limits)
        if self.top_logprobs and not self.logprobs and not limits.dialect.has_tgi_errors:
            raise ValidationError("`top_logprobs` needs `logprobs` to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValidationError(
                "`continue_final_message` and `add_generation_prompt` are mutually exclusive"
            )

    def generation(self, dialect: Dialect) -> GenerationRequest:
        """Translate, without a prompt; raises ValidationError."""
        request = super().generation(dialect)
        if self.max_completion_tokens is not None:
            names = request.names
            if not dialect.has_tgi_errors:
                newer = "max_completion_tokens"
                names = replace(names, max_new_tokens=newer, most_tokens=newer)
            request = replace(request, max_new_tokens=self.max_completion_tokens, names=names)
        return replace(
            request,
            top_n_tokens=self.top_logprobs if self.logprobs else None,
            top_n_allowed=TOP_LOGPROBS,
        )

    def chat(self, limits: Limits) -> Chat:
        """Check, and translate; raises RouterError."""
        self.check(limits)
        dialect = limits.dialect
        request, output_options = self.generation(dialect), self.output_options
        check_exclusive(self.tools, request, dialect)
        parallel = self.parallel_tool_calls is not False
        tools, choice = choose(as_tools(self.tools), self.tool_choice, parallel=parallel)
        return Chat(
            request=request,
            messages=for_template(self.messages, dialect),
            tools=tools,
            choice=choice,
            tool_prompt=self.tool_prompt,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            num_choices=self.num_choices,
            template_variables=self._variables(),
            adds_special_tokens=bool(self.add_special_tokens),
            output_options=output_options,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_name_ids=bool(self.return_tokens_as_token_ids),
            keeps_stops=dialect.keeps_stops,
            effort=self.effort,
            thinking_budget=self.thinking_budget,
            splits_thought=self.separate_reasoning is not False,
            shows_thought=self.shows_thought,
        )

    def _variables(self) -> dict[str, Any] | None:
        if self.documents is None:
            return self.chat_template_kwargs
        return {"documents": self.documents, **(self.chat_template_kwargs or {})}


class CompletionRequest(CommonRequest):
    """Body of `/v1/completions`."""

    scope = FieldScope.COMPLETION

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    """Whether the answer begins with the prompt."""
    logprobs: int | None = None
    """Candidates that come with the log probability of each token; with `echo`, of the prompt's tokens, too."""
    best_of: int | None = None

    @property
    def num_samples(self) -> int:
        """Samples of each prompt; the best of them are its choices."""
        return max(self.num_choices, self.best_of or 0)

    @property
    def only_scores(self) -> bool:
        """Whether the answer has the prompt's scores and no new tokens."""
        return self.max_tokens == 0

    def generation(self, dialect: Dialect) -> GenerationRequest:
        """Translate, without a prompt; a request that only scores its prompt samples one token, which is not shown."""
        request = replace(
            super().generation(dialect),
            top_n_tokens=self.logprobs,
            adds_special_tokens=self.add_special_tokens is not False,
        )
        if not dialect.has_tgi_errors:
            names = replace(request.names, prompt="prompt", top_n_tokens="logprobs")
            request = replace(request, names=names)
        if self.only_scores:
            request = replace(request, max_new_tokens=1, min_new_tokens=None)
        if self.echo and self.logprobs is not None:
            most = max(self.logprobs, request.prompt_top_n_tokens)
            request = replace(request, prompt_logprobs=True, prompt_top_n_tokens=most)
        return request

    def translated(self, limits: Limits) -> tuple[list[str | tuple[int, ...]], GenerationRequest]:
        """Check, and translate into all prompts, in the order of the choices, and a request without a prompt.

        Raises:
            RouterError: a field has a value that it may not have.

        """
        self.check(limits)
        prompts = prompts_of(self.prompt)
        highest = max((max(ids) for ids in prompts if isinstance(ids, tuple)), default=0)
        if highest >= limits.vocab_size:
            raise ValidationError(
                f"`prompt` contains token id {highest}, but the model knows only {limits.vocab_size}"
            )
        if self.best_of is not None:
            self._check_best_of(self.best_of, limits)
        if len(prompts) > limits.max_client_batch_size:
            raise BatchSizeExceeded(limits.max_client_batch_size)
        return prompts, self.generation(limits.dialect)

    def check(self, limits: Limits) -> None:
        """Check the fields besides the prompt; raises RouterError."""
        super().check(limits)
        if self.suffix:
            raise SuffixNotSupported
        if self.logprobs is not None and not 0 <= self.logprobs <= limits.max_top_n_tokens:
            raise ValidationError(
                f"`logprobs` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {self.logprobs}"
            )
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ValidationError("`echo` and `truncate_prompt_tokens` exclude each other")
        if self.only_scores and not self.echo:
            raise ValidationError("`max_tokens` must be strictly positive without `echo`")

    def _check_best_of(self, best_of: int, limits: Limits) -> None:
        if best_of < self.num_choices:
            raise ValidationError(
                f"`best_of` must be >= `n`. Given: {best_of} and {self.num_choices}"
            )
        if best_of == self.num_choices:
            return
        if best_of > limits.max_best_of:
            raise ValidationError(
                f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
            )
        if self.stream:
            raise ValidationError("`best_of` > `n` is not supported when streaming tokens")
        if self.temperature == 0:
            raise ValidationError("you must use sampling when `best_of` is > 1")
