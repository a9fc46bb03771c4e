"""What may be drawn: OpenAI's sampling parameters and their meaning, and what the text has to match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from millrace_proto.sampling import WARPERS
from millrace_router.api.body.fields import (
    UINT32_MAX,
    UINT64_MAX,
    FieldScope,
    Float32,
    Items,
    RequestModel,
    SamplingModel,
    UInt32,
)
from millrace_router.api.body.grammars import FormOfText
from millrace_router.errors import ValidationError
from millrace_router.request.float32 import rounded
from millrace_router.request.generation_request import DryRequest, FieldNames, GenerationRequest
from millrace_router.request.grammar import ANY_OBJECT, RawGrammar
from millrace_router.request.limits import Dialect
from millrace_router.request.request import FinishReason, GrammarKind
from millrace_router.request.token_stream import TokenEvent
from millrace_router.validation.rules import check_sampling
from millrace_router.validation.sampling_defaults import GREEDY_NAMES
from millrace_router.validation.sampling_defaults import NAMES as DEFAULTED

MAX_BIASES = 300
"""OpenAI's limit, too."""
MAX_BIAS = 100.0
MAX_DIGITS = 10
"""Digits of a token id, which is a 32-bit number."""
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), le=UINT64_MAX)]
MAX_PENALTY = 2.0
MAX_STOP_TOKENS = 64
MAX_TEMPERATURE = 2.0
TOP_LOGPROBS = 20
"""Most candidates for a token that OpenAI's chats and responses may request."""
TGI_NAMES = FieldNames(
    least_tokens="min_tokens", most_tokens="max_tokens", truncate="truncate_prompt_tokens"
)
"""TGI's names, and OpenAI's for what TGI lacks."""
OPENAI_NAMES = replace(
    TGI_NAMES, prompt="messages", max_new_tokens="max_tokens", top_n_tokens="top_logprobs"
)
META = frozenset("\\.+*?()|[]{}^$#&-~")
"""Characters with a meaning in regular expressions."""
Choice = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]


def biases_from(biases: Mapping[str, object]) -> tuple[tuple[int, float], ...]:
    """Read (token id, bias) pairs, each id once; whether the model has the tokens is checked later.

    Raises:
        ValidationError: there are too many pairs, a key is not a token id, or a bias is not a number from -100 to 100.

    """
    if len(biases) > MAX_BIASES:
        raise ValidationError(
            f"`logit_bias` must have at most {MAX_BIASES} tokens. Given: {len(biases)}"
        )
    return tuple((_id_from(key), _bias_from(key, value)) for key, value in biases.items())


def _id_from(key: str) -> int:
    # int() also accepts "05" and "1_0", with which one id could have two biases.
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS) or str(int(key)) != key:
        raise ValidationError(f"`logit_bias` must have token ids for keys. Given: {key[:20]}")
    return int(key)


def _bias_from(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_bias(value):
        raise ValidationError(
            f"`logit_bias` must have numbers from -100 to 100 for values. Token {key} has another"
        )
    return rounded(float(value))


def _is_bias(value: float) -> bool:
    return -MAX_BIAS <= value <= MAX_BIAS


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Options of the text of a choice."""

    special_tokens: bool = False
    """Whether special tokens are part of the text."""
    stops: bool = False
    """Whether what ended the answer, a stop string or a token, is part of the text."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    token_ids: bool = False
    """Whether the answer has the ids of its tokens in addition to the text."""

    def hides_end(self, event: TokenEvent) -> bool:
        """Return whether the token of `event` ends the answer and is not part of the text."""
        finished = event.finished
        if self.stops or finished is None:
            return False
        if event.token.id in self.stop_token_ids:
            return True
        # Other special tokens are shown; without them, a parser of calls decides about the end.
        return self.special_tokens and finished.finish_reason is FinishReason.EOS_TOKEN


DEFAULT_OUTPUT = OutputOptions()
"""Neither special tokens nor stop strings."""


class SamplingFields(SamplingModel):
    """Fields of chats, text completions and responses; null means absent."""

    seed: Seed | None = None
    """Makes the answer repeatable: the same seed and request give the same tokens. Range: whole numbers of 64 bits.
    Default: random.
    """
    stop: str | Items[str] | None = None
    """Texts that end the answer and are not part of it. Range: a text, or up to `--max-stop-sequences`. Default: none.
    """
    frequency_penalty: Float32 | None = None
    """Lowers the score of a token for each time that it is in the answer. Range: -2 to 2; 0 is off. Default: 0."""
    presence_penalty: Float32 | None = None
    """Lowers the scores of tokens that are in the answer. Range: -2 to 2; 0 is off. Default: 0."""
    ignore_eos: bool | None = None
    """Whether the answer goes on until `max_tokens`, even if the model ends it. Range: true or false.
    Default: false.
    """
    min_tokens: UInt32 | None = None
    """Tokens before which the model cannot end the answer. Range: 0 to `max_tokens`. Default: 0."""
    priority: int | None = None
    """Requests of a higher priority are served first. Range: -10 to 10. Default: the header `x-priority`, otherwise 0.
    """
    stop_token_ids: (
        Annotated[list[UInt32], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None
    ) = None
    """Tokens that end the answer and are not part of it. Range: at most 64 ids. Default: none."""
    include_stop_str_in_output: bool | None = None
    """Whether the text or token that ended the answer is part of it. Range: true or false. Default: false."""
    no_stop_trim: bool | None = None
    """SGLang's name of `include_stop_str_in_output`. Range: true or false. Default: false."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. Range: true or false. Default: true."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keeps this many of the prompt's last tokens. Range: 1 or more; -1 keeps as many as fit. Default: all."""
    cache_salt: Salt | None = None
    """Shares computed beginnings of prompts only with requests of the same salt. Range: 1 to 1024 characters. Default:
    none.
    """
    extra_key: Salt | None = None
    """A further salt, in SGLang's name. Range: 1 to 1024 characters. Default: none."""
    allowed_token_ids: Items[UInt32] | None = None
    """The only tokens that may be drawn. Range: ids of the vocabulary. Default: all."""
    bad_words: Items[str] | None = None
    """Words that the answer does not have. Range: at most 64 words. Default: none."""
    top_n_sigma: Float32 | None = None
    """Draws from the tokens whose score is within this many standard deviations of the greatest. Range: 0 or more; 0
    is off. Default: 0.
    """
    xtc_probability: Float32 | None = None
    """Chance to drop all likely tokens but the least likely of them. Range: 0 to 1; 0 is off. Default: 0."""
    xtc_threshold: Float32 | None = None
    """Probability from which `xtc_probability` takes a token to be likely. Range: 0 to 1. Default: 0.1."""
    dry_multiplier: Float32 | None = None
    """Lowers the score of a token that would extend a repeated passage: the strength of the DRY penalty. Range: 0 or
    more; 0 is off. Default: 0.
    """
    dry_base: Float32 | None = None
    """Growth of the DRY penalty with the passage. Range: 0 or more. Default: 1.75."""
    dry_allowed_length: UInt32 | None = None
    """Tokens that a passage may have before the DRY penalty begins. Range: 0 or more. Default: 2."""
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=UINT32_MAX)] | None = None
    """Last tokens in which the DRY penalty looks for a passage. Range: 0 or more; -1 is all. Default: -1."""
    dry_sequence_breakers: Items[str] | None = None
    """Texts that end a passage of the DRY penalty. Range: at most 16 texts. Default: line break, colon, quotation
    mark, asterisk.
    """

    @property
    def stop_sequences(self) -> list[str]:
        """Stop strings without empty ones, which stop nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def has_token_ids(self) -> bool:
        """Whether the answer has the ids of tokens; only some routes can have them."""
        return False

    @property
    def output_options(self) -> OutputOptions:
        """What of the tokens is part of the text."""
        return OutputOptions(
            special_tokens=self.skip_special_tokens is False,
            stops=bool(self.include_stop_str_in_output or self.no_stop_trim),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            token_ids=self.has_token_ids,
        )

    @property
    def _salt(self) -> tuple[str, ...]:
        salts = (self.cache_salt or "", self.extra_key or "")
        return salts if any(salts) else ()

    def sampling(self, dialect: Dialect) -> GenerationRequest:
        """Translate these fields, for `openai_generation` to complete; raises ValidationError."""
        return GenerationRequest(
            seed=None if self.seed is None else self.seed & UINT64_MAX,
            stop=tuple(self.stop_sequences),
            min_new_tokens=self.min_tokens,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            truncate=self.truncate_prompt_tokens,
            cache_salt=self._salt,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            top_n_sigma=max(self.top_n_sigma or 0.0, 0.0) or None,
            xtc_probability=self.xtc_probability or None,
            xtc_threshold=0.1 if self.xtc_threshold is None else self.xtc_threshold,
            dry=self._dry(),
            names=TGI_NAMES if dialect.has_tgi_errors else OPENAI_NAMES,
            **self.shared_sampling() | self._penalties(dialect),
        )

    def _dry(self) -> DryRequest | None:
        """Return the DRY penalty, unless it is off; absent fields have llama.cpp's defaults."""
        window = -1 if self.dry_penalty_last_n is None else self.dry_penalty_last_n
        if not self.dry_multiplier or window == 0:
            return None
        breakers = self.dry_sequence_breakers
        options = {
            "base": self.dry_base,
            "allowed_length": self.dry_allowed_length,
            "breakers": None if breakers is None else tuple(breakers),
        }
        others: dict[str, Any] = {name: one for name, one in options.items() if one is not None}
        return DryRequest(multiplier=self.dry_multiplier, window=max(window, 0), **others)

    def _penalties(self, dialect: Dialect) -> dict[str, Any]:
        repetition, presence = self.repetition_penalty, self.presence_penalty
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            if penalty is not None and not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ValidationError(f"`{name}` must be >= -2.0 and <= 2.0")
        if dialect.has_tgi_penalties:
            return {
                "repetition_penalty": repetition if presence is None else presence + 2.0,
                "frequency_penalty": self.frequency_penalty,
            }
        return {
            "openai_frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": presence or 0.0,
        }


def openai_generation(request: GenerationRequest, dialect: Dialect) -> GenerationRequest:
    """Take temperature 0 as greedy decoding, and neutral values as no restriction.

    Raises:
        ValidationError: the temperature or a restriction that greedy decoding ignores is out of range, or the dialect
            refuses the grammar.

    """
    if not dialect.has_tgi_errors and not 0 <= (request.temperature or 0) <= MAX_TEMPERATURE:
        raise ValidationError(f"`temperature` must be >= 0.0 and <= {MAX_TEMPERATURE}")
    if dialect.needs_properties and isinstance(request.grammar, RawGrammar):
        request.grammar.check_as_tgi()
    left_out = frozenset(name for name in DEFAULTED if getattr(request, name) is None)
    has_full_top_p = request.top_p == 1 and not dialect.refuses_full_top_p
    sampled = replace(
        request,
        do_sample=True,
        top_p=None if has_full_top_p else request.top_p,
        top_k=None if request.top_k in {-1, 0} else request.top_k,
        typical_p=None if request.typical_p == 1 else request.typical_p,
        left_out=left_out,
    )
    if request.temperature != 0:
        return sampled
    check_sampling(replace(sampled, temperature=None))
    no_warpers: dict[str, Any] = dict.fromkeys(WARPERS)
    return replace(request, left_out=left_out & GREEDY_NAMES, **no_warpers)


class StructuredOutputs(FormOfText):
    """vLLM's: one of these."""

    scope = FieldScope.STRUCTURED_OUTPUTS

    json_: Any = Field(alias="json", default=None)
    """A schema, as an object or as text."""
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    """In Lark's syntax."""
    json_object: bool | None = None

    def grammars(self) -> dict[str, RawGrammar]:
        """Return the grammars by the names of their fields."""
        return _by_field(
            "structured_outputs.",
            json=_schema(self.json_),
            regex=_of(GrammarKind.REGEX, self.regex),
            choice=one_of(self.choice),
            grammar=_of(GrammarKind.LARK, self.grammar),
            json_object=ANY_OBJECT if self.json_object else None,
        )


class GuidedFields(RequestModel):
    """Fields of chats and text completions."""

    structured_outputs: StructuredOutputs | None = None
    """A grammar for the answer, in vLLM's form. Range: one of `json`, `regex`, `choice`, `grammar` and `json_object`.
    Default: none.
    """
    guided_json: Any = None
    """JSON schema that the answer has to match. Range: at most one field with a grammar. Default: none."""
    guided_regex: str | None = None
    """Regular expression that the whole answer has to match. Range: at most one field with a grammar. Default: none."""
    guided_choice: Choice | None = None
    """Texts of which the answer is one. Range: 1 to 10000 texts; at most one field with a grammar. Default: none."""
    guided_grammar: str | None = None
    """Grammar in Lark's syntax that the answer has to match. Range: at most one field with a grammar. Default: none."""
    json_schema: Any = None
    """JSON schema that the answer has to match. Range: at most one field with a grammar. Default: none."""
    regex: str | None = None
    """Regular expression that the whole answer has to match. Range: at most one field with a grammar. Default: none."""
    ebnf: str | None = None
    """Grammar in Lark's syntax that the answer has to match. Range: at most one field with a grammar. Default: none."""

    def guide(self, response_format: RawGrammar | None) -> RawGrammar | None:
        """Return the request's only grammar, `response_format` included; raises ValidationError for several."""
        grammars = {} if self.structured_outputs is None else self.structured_outputs.grammars()
        grammars |= _by_field(
            "",
            guided_json=_schema(self.guided_json),
            guided_regex=_of(GrammarKind.REGEX, self.guided_regex),
            guided_choice=one_of(self.guided_choice),
            guided_grammar=_of(GrammarKind.LARK, self.guided_grammar),
            json_schema=_schema(self.json_schema),
            regex=_of(GrammarKind.REGEX, self.regex),
            ebnf=_of(GrammarKind.LARK, self.ebnf),
            response_format=response_format,
        )
        if len(grammars) > 1:
            names = ", ".join(f"`{name}`" for name in grammars)
            raise ValidationError(f"{names} exclude each other: the text can match only one")
        return next(iter(grammars.values()), None)


def one_of(choice: list[str] | None) -> RawGrammar | None:
    """Return the grammar of a text that is one of `choice`."""
    if choice is None:
        return None
    return RawGrammar(GrammarKind.REGEX, "|".join(f"(?:{_literal(text)})" for text in choice))


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char in META else char for char in text)


def _schema(value: object) -> RawGrammar | None:
    return None if value is None else RawGrammar(GrammarKind.JSON_SCHEMA, value)


def _of(kind: GrammarKind, source: str | None) -> RawGrammar | None:
    return None if source is None else RawGrammar(kind, source)


def _by_field(prefix: str, **grammars: RawGrammar | None) -> dict[str, RawGrammar]:
    return {prefix + name: one for name, one in grammars.items() if one is not None}
