"""Every rule of TGI's validation: message, order, defaults."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from millrace_router.api.tgi.request import GenerateParameters
from millrace_router.errors import SizeError, ValidationError
from millrace_router.request.dialect import TGI
from millrace_router.request.generation_request import FieldNames, GenerationRequest
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.limits import Limits
from millrace_router.request.request import Grammar, GrammarKind, SchedulingParameters
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation.rules import check_best_of, check_stream
from millrace_router.validation.sampling_defaults import SamplingDefaults
from millrace_router.validation.validator import Validator
from millrace_testing.router.edge import (
    LIMITS,
    FakeCompiler,
    grammars_of,
    limits_with,
    word_tokenizer,
)

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


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"temperature": -1.0}, RULES[1][1]),
        ({"repetition_penalty": -0.5}, RULES[2][1]),
        ({"frequency_penalty": -2.0001}, RULES[3][1]),
        ({"top_p": 0.0}, RULES[4][1]),
        ({"top_p": 0.999999999999}, RULES[4][1]),
        ({"typical_p": -0.1}, RULES[5][1]),
        ({"top_k": -5}, RULES[6][1]),
        ({"min_p": -0.001}, RULES[7][1]),
        ({"truncate": 9}, RULES[13][1].replace("Given: 0", "Given: 9")),
        ({"inputs": "  "}, "`inputs` cannot be empty"),
    ],
)
async def test_each_broken_rule_gets_its_message(broken: dict[str, Any], message: str) -> None:
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
async def test_strict_tgi_generates_what_fits(asked: int | None, given: int) -> None:
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


@pytest.mark.parametrize(
    ("parameters", "limits", "message"),
    [
        (
            {"best_of": 2},
            limits_with(max_best_of=1),
            "`best_of` != 1 is not allowed for this endpoint",
        ),
        ({"best_of": 3}, LIMITS, "`best_of` must be > 0 and <= 2. Given: 3"),
    ],
)
def test_best_of_is_checked_for_whole_answers(
    parameters: dict[str, Any], limits: Limits, message: str
) -> None:
    with pytest.raises(ValidationError, match="best_of") as caught:
        check_best_of(GenerationRequest(**parameters), limits)
    assert str(caught.value) == f"Input validation error: {message}"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"best_of": 2, "decoder_input_details": True},
            "`best_of` != 1 is not supported when streaming tokens",
        ),
        ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
)
def test_what_a_stream_cannot_do(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        check_stream(GenerationRequest(**parameters))
    assert str(caught.value) == f"Input validation error: {message}"
    check_stream(GenerationRequest(best_of=1))
    check_stream(GenerationRequest())


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_p": 0.99},
        {"typical_p": 0.01},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"best_of": 2, "min_p": 0.5},
        {"top_n_tokens": 5},
        {"top_n_tokens": 0},
        {"truncate": 8},
        {"best_of": 2, "top_k": 3},
        {"best_of": 0},
        {"seed": UINT64_MAX},
        {"stop": ["a"] * 4},
        {"max_new_tokens": 15},
    ],
)
async def test_the_bounds_themselves_are_allowed(parameters: dict[str, Any]) -> None:
    request = GenerationRequest(prompt="a", **parameters)
    await new_validator().validate(request)


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


async def test_truncated_prompts_count_by_what_is_left() -> None:
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
async def test_what_is_too_long_tells_how_long_it_is(
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
async def test_only_what_is_to_be_generated_is_counted(
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


async def test_ids_that_the_model_does_not_know() -> None:
    # The tokenizer's last word has id 7.
    assert (await new_validator().validate(GenerationRequest(prompt="b"))).request.input_ids == (7,)
    message = await refusal("a b a", limits_with(vocab_size=7))
    assert message == "`inputs` contains token id 7, but the model knows only 7"


async def test_biased_tokens_that_the_model_does_not_know() -> None:
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


async def test_what_is_only_checked_is_not_compiled() -> None:
    compiler = FakeCompiler(refusal=lambda _: "no such thing")
    validator = new_validator(compiler=compiler)
    await validator.check(guided())
    assert compiler.asked == []
    with pytest.raises(ValidationError) as caught:
        await validator.validate(guided())
    assert str(caught.value) == "Input validation error: grammar is not valid: no such thing"
    assert compiler.asked == [Grammar(GrammarKind.REGEX, "a+")]


async def test_what_is_refused_for_another_reason_is_not_compiled() -> None:
    compiler = FakeCompiler()
    request = replace(guided(), min_new_tokens=3, max_new_tokens=2)
    with pytest.raises(ValidationError, match="min_new_tokens"):
        await new_validator(compiler=compiler).validate(request)
    assert compiler.asked == []


async def test_the_native_routes_can_ask_for_the_least_number_of_tokens() -> None:
    request = GenerationRequest(prompt="a", min_new_tokens=2, max_new_tokens=2)
    assert (await new_validator().validate(request)).request.min_new_tokens == 2
