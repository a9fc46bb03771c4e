"""The poison search, the quarantine that it fills, and the route that shows the records."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from hashlib import sha256
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_proto.sampling import Sampling, SequenceRules
from millrace_router.recovery.poison_search import PoisonSearch
from millrace_router.recovery.quarantine import REFUSED_SECONDS, Quarantine
from millrace_router.request.continuation import Choice
from millrace_router.request.request import (
    Grammar,
    GrammarKind,
    Pooling,
    SchedulingParameters,
    ValidRequest,
)
from millrace_testing.adapters.fake_adapters import version_of
from millrace_testing.router.edge import serving
from millrace_testing.shards.fake_images import image_of, request_with


def positions(members: list[int]) -> dict[int, int]:
    return {member: 10 + member for member in members}


def search(members: list[int], poison: set[int]) -> tuple[list[int], int]:
    """Run until no suspects are left; returns the poison requests and the number of failures."""
    suspects: PoisonSearch = PoisonSearch()
    detected: list[int] = []
    alive, num_failures = list(members), 0
    while True:
        running = [m for m in alive if not suspects or m in suspects.group]
        if poison.isdisjoint(running):
            if not suspects:
                return detected, num_failures
            for member in running:
                suspects.computed(member, 10 + member)
            continue
        num_failures += 1
        culprit = suspects.fail(positions(running))
        if culprit is not None:
            assert running == [culprit], "found while other requests ran"
            detected.append(culprit)
            alive.remove(culprit)


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_only_the_poison_request_is_detected_within_the_bound(
    count: int, data: st.DataObject
) -> None:
    culprit = data.draw(st.integers(0, count - 1))
    detected, num_failures = search(list(range(count)), {culprit})
    assert detected == [culprit]
    assert num_failures <= 2 * math.log2(count) + 2


@settings(deadline=None)
@given(st.integers(2, 40), st.data())
def test_several_poison_requests_are_detected_one_after_the_other(
    count: int, data: st.DataObject
) -> None:
    poison = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=5))
    detected, num_failures = search(list(range(count)), poison)
    assert set(detected) == poison
    assert num_failures <= len(poison) * (2 * math.log2(count) + 2)


def test_a_failure_that_does_not_come_again_clears_every_suspect() -> None:
    suspects: PoisonSearch = PoisonSearch()
    assert suspects.fail(positions([1, 2, 3])) is None
    assert suspects.group == {1, 2, 3}
    assert not suspects.computed(1, 10), "short of where it failed"
    assert 1 in suspects
    assert [suspects.computed(member, 10 + member) for member in (1, 2, 3)] == [False, False, True]
    assert not suspects


def test_a_single_suspect_is_poison_after_a_second_failure_only() -> None:
    suspects: PoisonSearch = PoisonSearch()
    assert suspects.fail({7: 5}) is None
    assert suspects.fail({7: 5}) == 7
    assert not suspects


def test_the_last_suspect_runs_by_itself_before_it_counts_as_poison() -> None:
    suspects: PoisonSearch = PoisonSearch()
    suspects.fail({1: 5, 2: 5})
    suspects.computed(1, 5)
    assert suspects.fail({1: 6, 2: 5}) is None
    assert suspects.group == {2}
    assert suspects.fail({2: 5}) == 2


def test_a_half_that_runs_well_gives_way_to_the_other_one() -> None:
    suspects: PoisonSearch = PoisonSearch()
    suspects.fail(positions([1, 2, 3, 4]))
    suspects.fail(positions([1, 2, 3, 4]))
    assert suspects.group == {1, 2}
    assert not suspects.computed(1, 11)
    assert suspects.computed(2, 12), "others are to run now"
    assert suspects.group == {3}
    assert suspects.ended(3), "its client has left"
    assert suspects.group == {4}
    assert suspects.fail({4: 14}) == 4


def test_a_failure_of_others_begins_a_new_search() -> None:
    suspects: PoisonSearch = PoisonSearch()
    suspects.fail({1: 5})
    assert suspects.fail({8: 5, 9: 5}) is None
    assert suspects.group == {8, 9}


NUM_TOKENS = 12
IsBad = Callable[[set[int]], bool]


class Crowd:
    """Members that arrive over time and get one token per step; some sets of them break steps."""

    def __init__(self, arrivals: Iterable[tuple[int, int]], is_bad: IsBad) -> None:
        """`arrivals` has members, each with the number of the step before which it arrives."""
        self._coming = sorted((number, member) for member, number in arrivals)
        self._is_bad = is_bad
        self._suspects: PoisonSearch = PoisonSearch()
        self._tokens: dict[int, int] = {}
        self._admitted: list[int] = []
        self._running: list[int] = []
        self.detected: list[int] = []
        self.ended: list[int] = []
        self.failures: Counter[int] = Counter()
        """Failures of each member."""

    def run(self) -> None:
        num_steps = 0
        while self._coming or self._admitted:
            while self._coming and (self._coming[0][0] <= num_steps or not self._admitted):
                self._tokens[self._coming.pop(0)[1]] = 0
            num_steps += 1
            assert num_steps < 100_000, "no end"
            self._step()

    def _step(self) -> None:
        if not self._suspects:
            self._running, self._admitted = list(self._tokens), list(self._tokens)
        if self._is_bad(set(self._running)):
            self.failures.update(self._running)
            culprit = self._suspects.fail({m: self._tokens[m] + 1 for m in self._running})
            if culprit is not None:
                self.detected.append(culprit)
                self._gone(culprit)
            self._regroup()
            return
        must_regroup = False
        for member in tuple(self._running):
            self._tokens[member] += 1
            must_regroup |= self._suspects.computed(member, self._tokens[member])
            if self._tokens[member] == NUM_TOKENS:
                self.ended.append(member)
                self._gone(member)
                must_regroup |= self._suspects.ended(member)
        if must_regroup:
            self._regroup()

    def _gone(self, member: int) -> None:
        del self._tokens[member]
        self._admitted.remove(member)
        if member in self._running:
            self._running.remove(member)

    def _regroup(self) -> None:
        group = self._suspects.group
        self._running = [m for m in self._admitted if not group or m in group]


def most_failures(count: int) -> int:
    """Upper bound of one member's failures among `count` members, if no step fails with a single member."""
    return 2 + 2 * math.ceil(math.log2(count))


@settings(deadline=None)
@given(st.integers(2, 40), st.data())
def test_a_fault_that_takes_several_ends_without_a_poison_request(
    count: int, data: st.DataObject
) -> None:
    members = st.integers(0, count - 1)
    bad = data.draw(st.lists(st.sets(members, min_size=2, max_size=4), min_size=1, max_size=20))
    arrivals = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    crowd = Crowd(enumerate(arrivals), lambda running: any(some <= running for some in bad))
    crowd.run()
    assert not crowd.detected
    assert sorted(crowd.ended) == list(range(count))
    assert max(crowd.failures.values(), default=0) <= most_failures(count)


@settings(deadline=None)
@given(st.integers(2, 60), st.data())
def test_a_crowd_that_is_too_large_ends(count: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, count - 1))
    crowd = Crowd(((member, 0) for member in range(count)), lambda running: len(running) > limit)
    crowd.run()
    assert not crowd.detected
    assert sorted(crowd.ended) == list(range(count))
    assert max(crowd.failures.values()) <= most_failures(count)


@settings(deadline=None)
@given(st.integers(3, 40), st.data())
def test_a_poison_request_is_detected_in_a_crowd_that_also_breaks_without_it(
    count: int, data: st.DataObject
) -> None:
    culprit = data.draw(st.integers(0, count - 1))
    crowd = Crowd(
        ((member, 0) for member in range(count)),
        lambda running: culprit in running or {0, count - 1} <= running,
    )
    crowd.run()
    assert crowd.detected == [culprit]
    assert sorted([*crowd.ended, culprit]) == list(range(count))


def separated(members: list[int]) -> PoisonSearch:
    """A search without result whose suspects failed together twice more."""
    suspects: PoisonSearch = PoisonSearch()
    for _ in range(2):
        suspects.fail(positions(members))
    while suspects:
        for member in suspects.group:
            suspects.computed(member, 10 + member)
    for _ in range(2):
        suspects.fail(positions(members))
    return suspects


def test_requests_that_fail_again_after_a_search_run_separately_to_the_end() -> None:
    suspects = separated([1, 2, 3, 4])
    assert suspects.group == {1, 2}
    assert not suspects.computed(1, 1000)
    assert not suspects.computed(2, 1000)
    assert suspects.group == {1, 2}
    assert not suspects.ended(1)
    assert suspects.ended(2), "others are to run now"
    assert suspects.group == {3, 4}
    suspects.fail(positions([3, 4]))
    assert suspects.group == {3}
    assert suspects.ended(3)
    assert suspects.group == {4}
    assert suspects.ended(4)
    assert not suspects


def test_a_kill_while_requests_run_separately_blames_no_request() -> None:
    suspects = separated([1, 2])
    assert suspects.group == {1}
    for position in (50, 60):
        assert not suspects.computed(1, position)
        assert suspects.fail({1: position + 1}) is None
        assert suspects.group == {1}
    assert suspects.fail({1: 62}) == 1, "before it has got past where it failed"
    assert not suspects, "what breaks them is known now"


def test_a_detected_poison_request_clears_the_record_of_searched_requests() -> None:
    suspects: PoisonSearch = PoisonSearch()
    for _ in range(2):
        suspects.fail(positions([1, 2, 3, 4]))
    suspects.fail(positions([1, 2]))
    assert suspects.fail({1: 11}) == 1
    while suspects:
        for member in suspects.group:
            suspects.computed(member, 10 + member)
    for _ in range(2):
        suspects.fail(positions([2, 3, 4]))
    assert suspects.group == {2, 3}
    assert not suspects.computed(2, 12)
    assert suspects.computed(3, 13), "cleared, and not kept to its end"


def test_failures_that_do_not_repeat_never_split_the_group() -> None:
    suspects: PoisonSearch = PoisonSearch()
    for _ in range(10):
        suspects.fail(positions([1, 2, 3]))
        assert suspects.group == {1, 2, 3}
        for member in (1, 2, 3):
            suspects.computed(member, 10 + member)
        assert not suspects


SAMPLED = Sampling(do_sample=True, temperature=0.7, seed=7, bias=((70009, 1.0),))
POISON = ValidRequest(
    input_ids=(70001, 70002, 70003),
    max_new_tokens=20,
    sampling=SAMPLED,
    stop_sequences=("secret",),
    grammar=Grammar(GrammarKind.REGEX, "secret"),
)
OTHER_VALUES: dict[str, Any] = {
    "pooling": Pooling(),
    "images": request_with([image_of("secret")], 1).images,
    "input_ids": (70001, 70002, 70004),
    "max_new_tokens": 21,
    "sampling": replace(SAMPLED, top_k=3),
    "stop_sequences": ("secrets",),
    "ignore_eos": True,
    "stop_token_ids": (7,),
    "cache_salt": ("secret",),
    "min_new_tokens": 2,
    "top_n_tokens": 1,
    "prefill_logprobs": True,
    "prompt_top_n_tokens": 1,
    "grammar": Grammar(GrammarKind.REGEX, "secrets"),
    "adapter": version_of("secrets", number=2),
}


OTHER_SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 3,
    "top_p": 0.5,
    "typical_p": 0.5,
    "do_sample": False,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "openai_frequency_penalty": 0.5,
    "min_p": 0.5,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.5,
    "rules": SequenceRules(allowed_ids=(70009,)),
    "watermark": True,
    "bias": ((70009, 2.0),),
}


def holding(request: ValidRequest = POISON, *, num_generated: int = 0) -> Quarantine:
    quarantine = Quarantine()
    quarantine.add(request, num_generated=num_generated, reason="lost")
    return quarantine


def reseeded(request: ValidRequest, seed: int) -> ValidRequest:
    return replace(request, sampling=replace(request.sampling, seed=seed))


def test_no_request_is_refused_at_first() -> None:
    assert not Quarantine().refuses(POISON)


def test_the_same_request_is_refused_with_any_scheduling() -> None:
    again = replace(
        POISON, scheduling=SchedulingParameters(priority=3, tenant="b", max_queue_seconds=1.0)
    )
    assert holding().refuses(again)


def test_a_request_whose_tokens_are_recorded_is_refused_like_another() -> None:
    recorded = replace(POISON, choice=cast("Choice", object()))
    assert holding(recorded).refuses(POISON)
    assert holding(POISON).refuses(recorded)


@pytest.mark.parametrize(
    "name",
    [one.name for one in fields(ValidRequest) if one.compare and one.name != "scheduling"],
)
def test_a_request_that_differs_in_any_field_is_not_refused(name: str) -> None:
    assert not holding().refuses(replace(POISON, **{name: OTHER_VALUES[name]}))


def test_the_version_of_an_adapter_counts_and_its_name_does_not() -> None:
    version = version_of("a")
    quarantine = holding(replace(POISON, adapter=version))
    assert quarantine.refuses(replace(POISON, adapter=replace(version, name="another")))
    assert not quarantine.refuses(replace(POISON, adapter=version_of("a", number=1)))
    assert not quarantine.refuses(POISON)


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling) if field.name != "seed"])
def test_a_request_that_is_sampled_in_another_way_is_not_refused(name: str) -> None:
    sampling = replace(SAMPLED, **{name: OTHER_SAMPLING[name]})
    assert not holding().refuses(replace(POISON, sampling=sampling))


@pytest.mark.parametrize(
    ("num_generated", "sampling", "refused"),
    [(0, SAMPLED, True), (1, SAMPLED, False), (1, Sampling(seed=7), True)],
    ids=["before its first token", "after a sampled token", "after a greedy token"],
)
def test_another_seed_helps_only_if_it_could_choose_other_tokens(
    num_generated: int, sampling: Sampling, *, refused: bool
) -> None:
    poison = replace(POISON, sampling=sampling)
    quarantine = holding(poison, num_generated=num_generated)
    assert quarantine.refuses(poison)
    assert quarantine.refuses(reseeded(poison, 8)) is refused


def test_seed_zero_is_a_seed() -> None:
    quarantine = holding(reseeded(POISON, 0), num_generated=1)
    assert quarantine.refuses(reseeded(POISON, 0))
    assert not quarantine.refuses(POISON)


def test_a_poison_request_may_try_again_after_ten_minutes() -> None:
    now = 1000.0
    quarantine = Quarantine(clock=lambda: now)
    quarantine.add(POISON, num_generated=0, reason="lost")
    now += REFUSED_SECONDS - 1
    assert quarantine.refuses(POISON)
    now += 1
    assert not quarantine.refuses(POISON)
    assert len(quarantine.to_json()) == 1


def test_a_full_quarantine_drops_the_oldest_requests() -> None:
    quarantine = Quarantine(capacity=2)
    requests = [replace(POISON, max_new_tokens=count) for count in (1, 2, 3)]
    for request in requests:
        quarantine.add(request, num_generated=0, reason="lost")
    assert [quarantine.refuses(request) for request in requests] == [False, True, True]
    kept: Any = quarantine.to_json()
    assert [record["parameters"]["max_new_tokens"] for record in kept] == [3, 2]


def test_another_process_with_the_records_refuses_the_same_requests() -> None:
    now = 1000.0
    old, new = Quarantine(clock=lambda: now), Quarantine(clock=lambda: now, capacity=2)
    num_added = 0

    def count() -> None:
        nonlocal num_added
        num_added += 1

    old.on_added = count
    requests = [replace(POISON, max_new_tokens=tokens) for tokens in (1, 2, 3)]
    for request in requests:
        old.add(request, num_generated=0, reason="lost")
    new.resume(orjson.loads(orjson.dumps(old.learned())))
    # A function of another process.
    again = replace(requests[-1], answer_text=lambda: str.upper)
    assert (num_added, new.refuses(again)) == (3, True)
    assert new.to_json() == old.to_json()[:2]
    assert not new.refuses(requests[0])
    now += REFUSED_SECONDS
    assert not new.refuses(again)


async def test_the_route_shows_no_text_and_no_ids() -> None:
    async with serving() as edge:
        status, body, response = await edge.get("/v1/quarantine")
        assert (status, orjson.loads(body)) == (200, {"quarantined": []})
        assert response.content_type == "application/json"
        before = time.time()
        edge.batcher.quarantine.add(POISON, num_generated=5, reason="hung")
        _, body, _ = await edge.get("/v1/quarantine")
    (record,) = orjson.loads(body)["quarantined"]
    assert before <= record.pop("when") <= time.time()
    assert "secret" not in str(record)
    assert "7000" not in str(record)
    assert record == {
        "reason": "hung",
        "prompt_sha256": sha256(array("I", POISON.input_ids)).hexdigest(),
        "prompt_tokens": 3,
        "generated_tokens": 5,
        "parameters": {
            "temperature": 0.7,
            "top_k": 0,
            "top_p": 1.0,
            "typical_p": 1.0,
            "do_sample": True,
            "seed": 7,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "openai_frequency_penalty": 0.0,
            "min_p": 0.0,
            "top_n_sigma": 0.0,
            "xtc_probability": 0.0,
            "xtc_threshold": 0.0,
            "rules": False,
            "watermark": False,
            "bias": 1,
            "adapter_sha256": None,
            "grammar": "regex",
            "max_new_tokens": 20,
            "min_new_tokens": 0,
            "stop_sequences": 1,
            "ignore_eos": False,
            "stop_token_ids": 0,
            "top_n_tokens": 0,
            "prefill_logprobs": False,
            "prompt_top_n_tokens": 0,
        },
    }


async def test_the_key_opens_the_route() -> None:
    async with serving(api_key="secret") as edge:
        headers = {"authorization": "Bearer secret"}
        assert (await edge.get("/v1/quarantine"))[:2] == (401, b"")
        assert (await edge.get("/v1/quarantine", headers=headers))[0] == 200
