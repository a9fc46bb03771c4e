"""Every rule of TGI's validation: message, order, defaults of models, and messages on shapes."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError as ShapeError

from millrace_proto.sampling import NO_RULES, Dry, Sampling
from millrace_router.api.anthropic.request import MessagesRequest
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.api.tgi.request import CompatGenerateRequest, GenerateParameters
from millrace_router.errors import SizeError, ValidationError
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.generation_request import FieldNames, GenerationRequest
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.limits import TGI, Limits
from millrace_router.request.request import Grammar, GrammarKind, SchedulingParameters
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from millrace_router.validation.shape_messages import shape_error
from millrace_router.validation.validator import Validator
from millrace_testing.router.edge import (
    LIMITS,
    Edge,
    FakeCompiler,
    echo,
    grammars_of,
    limits_with,
    serving,
    word_tokenizer,
)
from millrace_testing.text.texts import tokenizer

UINT64_MAX = 2**64 - 1
NINE = " ".join(["a"] * 9)
EIGHT = " ".join(["a"] * 8)


def new_validator(limits: Limits = LIMITS, compiler: FakeCompiler | None = None) -> Validator:
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    return Validator(word_tokenizer(), limits, metrics, grammars_of(compiler))


async def refusal(inputs: str, limits: Limits = LIMITS, **parameters: Any) -> str:
    request = GenerateParameters(**parameters).generation(inputs)
    with pytest.raises(ValidationError) as caught:
        await new_validator(limits).validate(request)
    assert (caught.value.status, caught.value.error_type) == (422, "validation")
    return str(caught.value).removeprefix("Input validation error: ")


# In the order in which the rules are checked: each with a request that breaks it.
RULES: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"min_p": 1.5}, "`min_p` must be >= 0.0 and <= 1.0"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    (
        {"seed": 1, "best_of": 2, "do_sample": True},
        "`seed` must not be set when `best_of` > 1",
    ),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 8. Given: 0"),
    (
        {"inputs": EIGHT, "max_new_tokens": 2000},
        "`inputs` tokens + `max_new_tokens` must be <= 16. "
        "Given: 8 `inputs` tokens and 2000 `max_new_tokens`",
    ),
    ({"inputs": NINE}, "`inputs` must have less than 8 tokens. Given: 9"),
    ({"grammar": {"type": "json", "value": 5}}, "grammar is not supported"),
    (
        {"grammar": {"type": "regex", "value": "a"}, "ignore_eos": True},
        "`ignore_eos` has no meaning with a grammar, which decides where a text ends",
    ),
    (
        {"min_new_tokens": 3, "max_new_tokens": 2},
        "`min_new_tokens` must be <= `max_new_tokens`. Given: 3 and 2",
    ),
]


@pytest.mark.parametrize(("broken", "message"), RULES)
async def test_each_rule_has_its_message(broken: dict[str, Any], message: str) -> None:
    assert await refusal(**{"inputs": "hello", **broken}) == message


SAMPLING = {"temperature", "top_p", "typical_p", "top_k", "min_p", "do_sample"}
# Rules that can be broken together: neither sets what the other needs, and nothing mends the first of all.
PAIRS = [
    (first, second)
    for first, second in combinations(RULES, 2)
    if not first[0].keys() & second[0].keys()
    and not (first is RULES[0] and SAMPLING & second[0].keys())
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_the_earlier_rule_wins(
    first: tuple[dict[str, Any], str], second: tuple[dict[str, Any], str]
) -> None:
    assert await refusal(**{"inputs": "hello", **first[0], **second[0]}) == first[1]


@pytest.mark.parametrize(
    ("asked", "given"),
    [(None, 1992), (1, 1), (1024, 1024), (1992, 1992), (1993, 1992), (9**9, 1992)],
)
async def test_strict_tgi_generates_up_to_the_room_that_is_left(
    asked: int | None, given: int
) -> None:
    validator = new_validator(limits_with(max_total_tokens=2000, dialect=TGI))
    request = GenerationRequest(prompt=EIGHT, max_new_tokens=asked)
    assert (await validator.validate(request)).request.max_new_tokens == given


@pytest.mark.parametrize(
    ("server", "model", "asked", "given"),
    [
        ({}, None, None, 14),
        ({"default_max_new_tokens": 5}, None, None, 5),
        ({"default_max_new_tokens": 5}, None, 9, 9),
        ({"default_max_new_tokens": 5}, 3, None, 5),
        ({"default_max_new_tokens": 100}, 3, None, 14),
        ({"max_new_tokens_limit": 4}, None, None, 4),
        ({"max_new_tokens_limit": 4, "default_max_new_tokens": 7}, None, None, 4),
        ({"max_new_tokens_limit": 4}, None, 4, 4),
        ({"max_new_tokens_limit": 4, "dialect": TGI}, None, 9, 4),
    ],
)
async def test_the_server_bounds_answers(
    server: dict[str, Any], model: int | None, asked: int | None, given: int
) -> None:
    limits = limits_with(max_input_tokens=8, max_total_tokens=16, **server)
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    defaults = SamplingDefaults(max_new_tokens=model)
    validator = Validator(word_tokenizer(), limits, metrics, grammars_of(), defaults)
    request = GenerationRequest(
        prompt="a a", max_new_tokens=asked, left_out=frozenset({"max_new_tokens"})
    )
    assert (await validator.validate(request)).request.max_new_tokens == given


async def test_more_than_the_server_gives_is_refused_in_the_clients_words() -> None:
    limits = limits_with(max_new_tokens_limit=4)
    assert await refusal("a", limits, max_new_tokens=5) == "`max_new_tokens` must be <= 4. Given: 5"
    names = FieldNames(max_new_tokens="max_completion_tokens")
    with pytest.raises(SizeError, match="`max_completion_tokens` must be <= 4"):
        await new_validator(limits).validate(
            GenerationRequest(prompt="a", max_new_tokens=5, names=names)
        )


async def test_strict_tgi_counts_1024_new_tokens() -> None:
    limits = limits_with(max_total_tokens=1031, dialect=TGI)
    expected = (
        "`inputs` tokens + `max_new_tokens` must be <= 1031. "
        "Given: 8 `inputs` tokens and 1024 `max_new_tokens`"
    )
    assert await refusal(EIGHT, limits, max_new_tokens=1500) == expected
    assert await refusal(EIGHT, limits_with(max_total_tokens=2000), max_new_tokens=1993) == (
        "`inputs` tokens + `max_new_tokens` must be <= 2000. "
        "Given: 8 `inputs` tokens and 1993 `max_new_tokens`"
    )


async def test_defaults_are_neutral() -> None:
    request = GenerationRequest(prompt="a b")
    valid = (await new_validator().validate(request)).request
    assert valid.max_new_tokens == 14
    assert not valid.sampling.samples
    assert (valid.top_n_tokens, valid.stop_sequences, valid.ignore_eos) == (0, (), False)
    assert valid.sampling.repetition_penalty == 1.0
    assert valid.sampling.frequency_penalty == 0.0


async def test_values_are_passed_on() -> None:
    request = GenerationRequest(
        prompt="a",
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        typical_p=0.75,
        seed=UINT64_MAX,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.125,
        openai_frequency_penalty=0.0625,
        min_p=0.03125,
        watermark=True,
        logit_bias=((7, -100.0), (0, 0.5)),
        stop=("x",),
        ignore_eos=True,
        decoder_input_details=True,
        top_n_tokens=2,
    )
    validator = new_validator(limits_with(prefill_logprobs=True))
    valid = (await validator.validate(request)).request
    sampling = valid.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.25)
    assert (sampling.typical_p, sampling.seed, sampling.repetition_penalty) == (
        0.75,
        UINT64_MAX,
        1.5,
    )
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 0.125)
    assert (sampling.openai_frequency_penalty, sampling.min_p) == (0.0625, 0.03125)
    assert sampling.watermark
    assert sampling.bias == ((7, -100.0), (0, 0.5))
    assert valid.prefill_logprobs
    assert valid.ignore_eos
    assert (valid.stop_sequences, valid.top_n_tokens) == (("x",), 2)


async def test_seeds_are_drawn_anew() -> None:
    request = GenerationRequest(prompt="a", do_sample=True)
    validator = new_validator()
    seeds = {(await validator.validate(request)).request.sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed <= UINT64_MAX for seed in seeds)


async def test_truncated_prompts_count_only_the_tokens_that_are_left() -> None:
    long = " ".join(["b"] * 500 + ["hello", "a"])
    validator = new_validator()
    request = GenerationRequest(prompt=long, truncate=2)
    validated = await validator.validate(request)
    assert validated.inputs == long
    assert validated.request.input_ids == word_tokenizer().encode("hello a")
    assert validated.request.max_new_tokens == 14


async def test_a_check_trusts_and_refuses_as_a_validation_does() -> None:
    scheduling = SchedulingParameters(priority=1)
    plain = GenerationRequest(prompt="a b", seed=1)
    request = replace(plain, scheduling=scheduling)
    validator = new_validator()
    checked = await validator.check(request)
    assert checked == await validator.validate(request)
    assert checked.request.scheduling == scheduling
    assert (await validator.validate(plain)).request.scheduling == SchedulingParameters()
    for broken, message in RULES:
        inputs, parameters = str(broken.get("inputs", "hello")), dict(broken)
        parameters.pop("inputs", None)
        request = GenerateParameters(**parameters).generation(inputs)
        with pytest.raises(ValidationError) as caught:
            await validator.check(request)
        assert str(caught.value) == f"Input validation error: {message}"


@pytest.mark.parametrize(
    ("words", "max_new_tokens", "counted"),
    [(9, None, 7), (9, 3, 3), (20, None, 0), (8, 9, 9)],
)
async def test_size_error_reports_lengths(
    words: int, max_new_tokens: int | None, counted: int
) -> None:
    request = GenerationRequest(prompt="a " * words, max_new_tokens=max_new_tokens)
    with pytest.raises(SizeError) as caught:
        await new_validator().check(request)
    assert (caught.value.num_prompt_tokens, caught.value.max_new_tokens) == (words, counted)


@pytest.mark.parametrize(
    ("parameters", "inputs", "lengths", "new_tokens"),
    [
        ({}, "a b", 1, 1),
        # TGI counts the length of whatever has a valid one.
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "a b", 1, 0),
        ({}, NINE, 0, 0),
    ],
)
async def test_only_requests_to_be_generated_are_counted(
    parameters: dict[str, Any], inputs: str, lengths: int, new_tokens: int
) -> None:
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    validator = Validator(word_tokenizer(), LIMITS, metrics, grammars_of())
    request = GenerationRequest(prompt=inputs, **parameters)
    histograms = (metrics.request_input_length, metrics.request_max_new_tokens)
    with suppress(ValidationError):
        await validator.check(request)
    assert [sum(histogram.counts) for histogram in histograms] == [0, 0]
    with suppress(ValidationError):
        await validator.validate(request)
    assert [sum(histogram.counts) for histogram in histograms] == [lengths, new_tokens]


async def test_tokenizer_failures_are_reported() -> None:
    request = GenerationRequest(prompt="\ud800")
    with pytest.raises(ValidationError, match=r"^Input validation error: tokenizer error "):
        await new_validator().validate(request)


async def test_token_ids_that_the_model_does_not_know_are_refused() -> None:
    # The tokenizer's last word has id 7.
    assert (await new_validator().validate(GenerationRequest(prompt="b"))).request.input_ids == (7,)
    message = await refusal("a b a", limits_with(vocab_size=7))
    assert message == "`inputs` contains token id 7, but the model knows only 7"


async def test_biases_of_tokens_that_the_model_does_not_know_are_refused() -> None:
    validator = new_validator()
    for id_, known in ((7, True), (8, False), (2**40, False)):
        request = GenerationRequest(prompt="a", logit_bias=((1, 1.0), (id_, 1.0)))
        validating = validator.validate(request)
        if known:
            await validating
            continue
        with pytest.raises(ValidationError) as caught:
            await validating
        assert str(caught.value) == (
            "Input validation error: "
            f"`logit_bias` contains token id {id_}, but the model knows only 8"
        )


def guided(value: str = "a+") -> GenerationRequest:
    return GenerationRequest(prompt="a", grammar=RawGrammar(GrammarKind.REGEX, value))


async def test_a_grammar_is_passed_on() -> None:
    valid = (await new_validator().validate(guided())).request
    assert valid.grammar == Grammar(GrammarKind.REGEX, "a+")
    assert (await new_validator().validate(GenerationRequest(prompt="a"))).request.grammar is None


async def test_grammars_are_refused_where_they_are_off() -> None:
    compiler = FakeCompiler()
    validator = new_validator(limits_with(grammars=False), compiler)
    # Whatever else is wrong with it.
    for value in ("a+", "(" * 999):
        with pytest.raises(ValidationError, match=r"^Input validation error: grammar is not supp"):
            await validator.validate(guided(value))
    assert compiler.asked == []


async def test_checked_requests_are_not_compiled() -> None:
    compiler = FakeCompiler(refusal=lambda _: "no such thing")
    validator = new_validator(compiler=compiler)
    await validator.check(guided())
    assert compiler.asked == []
    with pytest.raises(ValidationError) as caught:
        await validator.validate(guided())
    assert str(caught.value) == "Input validation error: grammar is not valid: no such thing"
    assert compiler.asked == [Grammar(GrammarKind.REGEX, "a+")]


async def test_refused_requests_are_not_compiled() -> None:
    compiler = FakeCompiler()
    request = replace(guided(), min_new_tokens=3, max_new_tokens=2)
    with pytest.raises(ValidationError, match="min_new_tokens"):
        await new_validator(compiler=compiler).validate(request)
    assert compiler.asked == []


async def test_the_native_routes_can_ask_for_the_least_number_of_tokens() -> None:
    request = GenerationRequest(prompt="a", min_new_tokens=2, max_new_tokens=2)
    assert (await new_validator().validate(request)).request.min_new_tokens == 2


USER = {"role": "user", "content": "a"}
MODELS: dict[Any, dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "a"},
    CompatGenerateRequest: {"inputs": "a"},
    MessagesRequest: {"messages": [USER], "max_tokens": 5, "model": "x"},
    ResponsesRequest: {"input": "a"},
}
WRONG: tuple[Any, ...] = (None, True, -(10**30), 1.5, 1e300, "x", "", [], [[]], [{}], {}, {"a": 1})
PYDANTICS = ("Input should", "Input tag", "Field required", "Value error", "a valid ", "Extra in")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_messages_have_no_words_of_pydantic(model: Any) -> None:
    whole = MODELS[model]
    errors = 0
    for name in model.model_fields:
        for value in WRONG:
            body = whole | {name: value}
            try:
                model.model_validate(body)
            except ShapeError as caught:
                errors += 1
                message = shape_error(caught, body).client_text
                assert not any(word in message for word in PYDANTICS), message
                assert name in message or message.startswith("The body ")
    assert errors > 20


def test_alternatives_are_not_part_of_a_path() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    with pytest.raises(ShapeError) as caught:
        ChatCompletionRequest.model_validate(body)
    assert (
        shape_error(caught.value, body).client_text == "`messages[0].content[0].text` is required"
    )


WIDE = limits_with(max_input_tokens=100, max_total_tokens=200)
TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
QWEN: dict[str, Any] = json.loads(
    '{"bos_token_id": 1, "do_sample": true, "repetition_penalty": 1.5, "temperature": 0.5,'
    ' "top_p": 0.75, "top_k": 20, "transformers_version": "4.51.0"}'
)
"""In the form of a published model's file."""
TURNS = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 7},
}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def serving_with(config: dict[str, Any]) -> Any:
    defaults = SamplingDefaults.of(config)
    return serving(echo, limits=WIDE, template=TEMPLATE, defaults=defaults)


async def sampled(config: dict[str, Any], route: str, **fields: Any) -> dict[str, Any]:
    """The resolved parameters of a request."""
    async with serving_with(config) as edge:
        await edge.answer(route, {**BODIES[route], **fields})
        sampling = edge.batcher.requests[-1].sampling
        return {name: getattr(sampling, name) for name in (*NEUTRAL, "samples")}


@pytest.mark.parametrize("route", BODIES)
async def test_omitted_parameters_are_the_models(route: str) -> None:
    expected = {
        "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.0,
        "repetition_penalty": 1.5, "samples": True,
    }  # fmt: skip
    assert await sampled(QWEN, route) == expected
    assert await sampled(QWEN, route, temperature=0.25) == expected | {"temperature": 0.25}
    # A neutral value was not left out.
    assert await sampled(QWEN, route, top_p=1, temperature=1) == expected | {
        "temperature": 1.0,
        "top_p": 1.0,
    }
    assert await sampled({}, route) == NEUTRAL | {"samples": True}


@pytest.mark.parametrize("route", BODIES)
async def test_greedy_requests_stay_greedy(route: str) -> None:
    expected = NEUTRAL | {"samples": False, "repetition_penalty": 1.5}
    assert await sampled(QWEN, route, temperature=0) == expected


@pytest.mark.parametrize("route", BODIES)
async def test_a_model_may_be_greedy_by_default(route: str) -> None:
    config = QWEN | {"temperature": 0.0}
    expected = NEUTRAL | {"samples": False, "repetition_penalty": 1.5}
    assert await sampled(config, route) == expected
    assert (await sampled(config, route, temperature=0.5))["samples"]


async def test_native_routes_keep_tgis_defaults() -> None:
    async with serving_with(QWEN) as edge:
        await edge.post("/generate", {"inputs": "hello", "parameters": {}})
        assert not edge.batcher.requests[-1].sampling.samples
        await edge.post("/generate", {"inputs": "hello"})
        assert edge.batcher.requests[-1].sampling.temperature == 1.0


async def test_new_tokens_are_bounded_where_a_request_has_no_bound() -> None:
    async with serving_with({"max_new_tokens": 5}) as edge:
        for fields, expected in (
            ({}, 5),
            ({"max_tokens": 7}, 7),
            ({"max_completion_tokens": 8}, 8),
        ):
            body = BODIES["/v1/chat/completions"] | fields
            await edge.post("/v1/chat/completions", body)
            assert edge.batcher.requests[-1].max_new_tokens == expected
        await edge.post("/generate", {"inputs": "hello"})
        assert edge.batcher.requests[-1].max_new_tokens == 199
    async with serving_with({"max_new_tokens": 5000}) as edge:
        await edge.post("/v1/completions", BODIES["/v1/completions"])
        assert edge.batcher.requests[-1].max_new_tokens == 199


async def test_a_response_repeats_the_parameters_of_the_model() -> None:
    async with serving_with(QWEN) as edge:
        _, answer, _ = await edge.post("/v1/responses", BODIES["/v1/responses"])
        assert (answer["temperature"], answer["top_p"]) == (0.5, 0.75)


def test_values_that_restrict_nothing_are_none() -> None:
    config = {"temperature": 1, "top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1.0}
    assert SamplingDefaults.of(config) == NO_DEFAULTS
    assert SamplingDefaults.of({"top_k": -1, "temperature": None}) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", "1"), ("temperature", True), ("top_k", -2),
        ("top_k", 1.5), ("top_p", 0), ("top_p", 1.5), ("min_p", 2), ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)  # fmt: skip
def test_values_without_a_meaning_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        SamplingDefaults.of({name: value})


WIDE_LIMITS = limits_with(max_input_tokens=100, max_total_tokens=200, vocab_size=300)
BYTES = tokenizer("byte_level")
ROUTE = "/v1/completions"


async def sampling_of(edge: Edge, **fields: Any) -> Sampling:
    body = {"prompt": "hello", "max_tokens": 1, **fields}
    await edge.answer(ROUTE, body)
    return edge.batcher.requests[-1].sampling


def serving_bytes() -> Any:
    return serving(echo, limits=WIDE_LIMITS, tokenizer=BYTES)


async def test_sampler_parameters_reach_the_request() -> None:
    async with serving_bytes() as edge:
        sampling = await sampling_of(edge, top_n_sigma=1.5, xtc_probability=0.5)
        assert (sampling.top_n_sigma, sampling.xtc_probability) == (1.5, 0.5)
        assert sampling.xtc_threshold == pytest.approx(0.1)
        sampling = await sampling_of(edge, xtc_probability=1, xtc_threshold=0.25, top_n_sigma=-1)
        assert (sampling.top_n_sigma, sampling.xtc_threshold) == (0, 0.25)
        greedy = await sampling_of(edge, top_n_sigma=1.5, xtc_probability=0.5, temperature=0)
        assert not greedy.samples
        assert (await sampling_of(edge)).rules == NO_RULES


async def test_bad_words_are_banned_with_and_without_a_blank() -> None:
    async with serving_bytes() as edge:
        rules = (await sampling_of(edge, bad_words=["hello", " hello"])).rules
    assert rules.bad_words == (tuple(BYTES.encode("hello")), tuple(BYTES.encode(" hello")))


async def test_dry_has_the_defaults_of_llama_cpp() -> None:
    with_line_break = {id_ for id_ in range(BYTES.vocab_size) if "\n" in BYTES.token_text(id_)}
    async with serving_bytes() as edge:
        dry = (await sampling_of(edge, dry_multiplier=0.75)).rules.dry
        assert dry is not None
        assert (dry.multiplier, dry.base, dry.allowed_length, dry.window) == (0.75, 1.75, 2, 0)
        assert with_line_break < set(dry.breakers)
        given = await sampling_of(
            edge,
            dry_multiplier=0.5,
            dry_base=2,
            dry_allowed_length=3,
            dry_penalty_last_n=64,
            dry_sequence_breakers=["\n"],
        )
        breakers = tuple(sorted(with_line_break))
        expected = Dry(multiplier=0.5, base=2, allowed_length=3, window=64, breakers=breakers)
        assert given.rules.dry == expected
        for off in ({"dry_base": 2}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}):
            assert (await sampling_of(edge, **off)).rules == NO_RULES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [300]),
        ("bad_words", [" "]),
        ("bad_words", ["a"] * 65),
        ("bad_words", ["a" * 257]),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -1),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["a"] * 17),
        ("dry_base", -1),
    ],
)
async def test_sequence_rules_without_a_meaning_are_refused_by_name(
    name: str, value: object
) -> None:
    async with serving_bytes() as edge:
        body = {"prompt": "hello", "max_tokens": 1, "dry_multiplier": 1, name: value}
        status, answer, _ = await edge.post(ROUTE, body)
    assert status == 422
    assert f"`{name}`" in str(answer)


async def test_blocks_of_prompts_that_see_all_of_themselves_are_shared_only_by_equal_ones() -> None:
    limits = replace(LIMITS, whole_prompts=True)
    keys = []
    for ids, salt in (((1, 2, 3), ()), ((1, 2, 3), ()), ((1, 2, 4), ()), ((1, 2, 3), ("a",))):
        request = GenerationRequest(prompt=ids, cache_salt=salt, max_new_tokens=1)
        valid = (await new_validator(limits).validate(request)).request
        hashes = BlockHashes(2, None, valid.cache_salt, images=valid.images)
        keys.append(hashes.first(1, valid.input_ids, ())[0])
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
