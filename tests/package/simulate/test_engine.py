"""The clock of the simulator, on cases that are computed by hand."""

from __future__ import annotations

import math

import pytest

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import SimulationMetrics
from millrace.simulate.simulated_request import Arrival

COST = {
    "step": 1.0,
    "decode_row": 0.1,
    "decode_context_token": 0.0,
    "prefill_step": 0.5,
    "prefill_token": 0.01,
    "prefill_pair": 0.0,
}
DECODE = 1.1
"""Seconds of a step that decodes one row."""


def deployment(**changes: object) -> Deployment:
    values = {"cost_model": COST, "num_blocks": 1001, "block_size": 4, "max_total_tokens": 1000}
    return Deployment.model_validate(values | changes)


def run(arrivals: list[Arrival], **changes: object) -> SimulationMetrics:
    engine = Engine(deployment(**changes))
    for arrival in arrivals:
        while engine.next_event < arrival.arrived_at:
            engine.step()
        engine.arrive(arrival)
    while engine.next_event < math.inf:
        engine.step()
    return engine.metrics


def test_one_request_alone_pays_for_its_prefill_and_then_for_each_decode() -> None:
    metrics = run([Arrival(7.0, 100, 5)])
    first = 1.0 + 0.5 + 100 * 0.01
    assert metrics.queue.percentile(50) == 0.0
    assert metrics.first_token.percentile(50) == pytest.approx(first)
    assert metrics.between_tokens.count == 4
    assert metrics.between_tokens.percentile(1) == pytest.approx(DECODE)
    assert metrics.between_tokens.percentile(100) == pytest.approx(DECODE)
    assert metrics.latency.percentile(50) == pytest.approx(first + 4 * DECODE)
    assert metrics.started_at == 7.0
    assert metrics.ended_at == pytest.approx(7.0 + first + 4 * DECODE)
    assert (metrics.output_tokens, metrics.prefill_tokens) == (5, 100)


def test_the_end_is_known_one_step_late_unless_the_limit_determines_it() -> None:
    surprised = run([Arrival(0.0, 100, 5)])
    announced = run([Arrival(0.0, 100, 5, max_new_tokens=5)])
    one_at_a_time = run([Arrival(0.0, 100, 5)], steps_in_flight=1)
    assert announced.busy_seconds == pytest.approx(2.5 + 4 * DECODE)
    assert surprised.busy_seconds == pytest.approx(2.5 + 5 * DECODE)
    assert one_at_a_time.busy_seconds == pytest.approx(2.5 + 4 * DECODE)
    assert surprised.latency.mean == announced.latency.mean == one_at_a_time.latency.mean
    assert surprised.between_tokens.count == 4


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    metrics = run([Arrival(0.0, 100, 1)], max_batch_prefill_tokens=40)
    assert metrics.first_token.mean == pytest.approx(3 * 1.5 + 100 * 0.01)


def test_a_prompt_that_comes_early_in_a_step_is_in_the_next_one() -> None:
    # At 0 a prefill (until 2.5) is sent, at 2.25 the step with a decode and the prompt (2.5 + 0.1 long).
    metrics = run([Arrival(0.0, 100, 10), Arrival(0.1, 100, 1)])
    assert metrics.queue.percentile(100) == pytest.approx(2.25 - 0.1)
    assert metrics.first_token.percentile(100) == pytest.approx(2.5 + 2.6 - 0.1)
    # At 2.25 a decode (2.5 until 3.6) is sent, at 3.49 the step with both.
    metrics = run([Arrival(0.0, 100, 10), Arrival(2.3, 100, 1)])
    assert metrics.queue.percentile(100) == pytest.approx(2.5 + 0.9 * DECODE - 2.3)
    assert metrics.first_token.percentile(100) == pytest.approx(3.6 + 2.6 - 2.3)
    # A server that has learned to plan earlier is simulated so.
    metrics = run([Arrival(0.0, 100, 10), Arrival(2.3, 100, 1)], late_planning_share=0.5)
    assert metrics.queue.percentile(100) == pytest.approx(2.5 + 0.5 * DECODE - 2.3)


def test_a_prompt_that_comes_during_a_step_waits_for_the_two_that_were_sent() -> None:
    # At 0 a prefill (until 2.5) and a decode (until 3.6) are sent, at 2.5 the step with both (2.5 + 0.1 long).
    metrics = run([Arrival(0.0, 100, 10), Arrival(0.1, 100, 1)], late_planning="off")
    assert metrics.queue.percentile(100) == pytest.approx(2.5 - 0.1)
    assert metrics.first_token.percentile(100) == pytest.approx(3.6 + 2.6 - 0.1)
    assert metrics.between_tokens.percentile(100) == pytest.approx(2.6)
    assert metrics.between_tokens.percentile(50) == pytest.approx(DECODE)


def test_steps_differ_by_the_ratios_that_are_given_in_their_order() -> None:
    even, varied = (run([Arrival(0.0, 100, 400)], step_ratios=r) for r in ((), (0.5, 1.5, 1.0)))
    assert varied.busy_seconds == pytest.approx(even.busy_seconds, rel=0.01)
    assert even.between_tokens.percentile(90) == pytest.approx(DECODE, rel=0.011)
    assert varied.first_token.mean == pytest.approx(0.5 * even.first_token.mean)
    assert varied.between_tokens.percentile(30) == pytest.approx(0.5 * DECODE, rel=0.011)
    assert varied.between_tokens.percentile(90) == pytest.approx(1.5 * DECODE, rel=0.011)


def test_an_answer_comes_when_the_router_has_handed_it_out() -> None:
    at_once, later = (run([Arrival(0.0, 100, 5)], turn_seconds=turn) for turn in (0.0, 0.25))
    # The shards are at the next step meanwhile.
    assert later.latency.mean == pytest.approx(at_once.latency.mean + 0.25)
    assert later.first_token.mean == pytest.approx(at_once.first_token.mean + 0.25)
    entered = run([Arrival(0.0, 100, 5)], entry_seconds=0.5)
    assert entered.first_token.mean == pytest.approx(at_once.first_token.mean + 0.5)
    assert entered.latency.mean == pytest.approx(at_once.latency.mean + 0.5)
    assert entered.queue.mean == at_once.queue.mean


def test_a_step_that_ends_before_the_next_one_was_to_be_planned_has_it_planned_then() -> None:
    arrivals = [Arrival(0.0, 100, 50)]
    metrics = run(arrivals, step_ratios=(0.01,))
    assert metrics.latency.mean == pytest.approx(metrics.busy_seconds)


def test_the_cost_grows_with_rows_and_context() -> None:
    costs = dict.fromkeys(COST, 0.0) | {"decode_row": 1.0, "decode_context_token": 0.01}
    metrics = run([Arrival(0.0, 10, 3, 3), Arrival(0.0, 20, 3, 3)], cost_model=costs)
    # The first decode attends to 11 and 21 positions, the second to 12 and 22.
    assert metrics.busy_seconds == pytest.approx(2 + 0.32 + 2 + 0.34)


def test_what_one_step_computed_is_a_hit_for_the_next_of_the_group() -> None:
    arrivals = [Arrival(float(100 * n), 50, 2, group="g", prefix_tokens=40) for n in range(3)]
    metrics = run(arrivals)
    assert (metrics.cached_tokens, metrics.prefill_tokens) == (80, 150 - 80)
    assert metrics.first_token.percentile(100) == pytest.approx(1.5 + 50 * 0.01)
    assert metrics.first_token.percentile(50) == pytest.approx(1.5 + 10 * 0.01)
    assert run(arrivals, prefix_caching="off").cached_tokens == 0


def test_a_conversation_finds_the_answer_of_its_last_turn() -> None:
    first = Arrival(0.0, 40, 21, group="talk", prefix_tokens=61)
    second = Arrival(500.0, 80, 1, group="talk", prefix_tokens=81)
    # KV of the last token of an answer is never computed: 60 positions of the first turn are there.
    assert run([first, second]).cached_tokens == 60


def test_full_reservation_serves_one_after_the_other_where_growing_serves_both() -> None:
    arrivals = [Arrival(0.0, 10, 5), Arrival(0.0, 10, 5)]
    grown = run(arrivals, num_blocks=31, max_total_tokens=100)
    full = run(arrivals, num_blocks=31, max_total_tokens=100, kv_reservation="full")
    assert grown.queue.percentile(100) == 0.0
    # Blocks are free when the decode that was sent before the end was known is answered.
    assert full.queue.percentile(100) == pytest.approx(1.6 + 5 * DECODE)
    assert full.row_seconds / full.busy_seconds == pytest.approx(1.0)
    assert full.finished == grown.finished == 2


def test_preempted_requests_are_replayed_and_count_once() -> None:
    arrivals = [Arrival(0.0, 16, 60, max_new_tokens=70) for _ in range(6)]
    metrics = run(arrivals, num_blocks=41, max_total_tokens=100, prefix_caching="off")
    assert metrics.preemptions > 0
    assert (metrics.finished, metrics.output_tokens) == (6, 6 * 60)
    assert metrics.between_tokens.count == 6 * 59
    assert metrics.first_token.count == metrics.queue.count == metrics.latency.count == 6
    assert metrics.prefill_tokens > 6 * 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_concurrent_requests": 2}, "overloaded"),
        ({"max_queue_size": 2}, "queue full"),
        ({"max_input_tokens": 9}, "too long"),
    ],
)
def test_refusals_are_counted_by_their_reason(changes: dict[str, int], reason: str) -> None:
    metrics = run([Arrival(0.0, 10, 5) for _ in range(3)], **changes)
    number = 3 if reason == "too long" else 1
    assert metrics.rejected == {reason: number}
    assert metrics.finished == 3 - number


def test_an_answer_that_cannot_fit_is_refused_and_one_that_need_not_is_cut() -> None:
    metrics = run([Arrival(0.0, 950, 100, max_new_tokens=100), Arrival(0.0, 950, 100)])
    assert metrics.rejected == {"too long": 1}
    assert metrics.output_tokens == 50


def test_who_would_wait_for_longer_than_he_is_willing_to_is_refused_at_once() -> None:
    arrivals = [Arrival(0.0, 10, 50), Arrival(0.1, 10, 5, max_queue_seconds=5.0)]
    metrics = run(arrivals, max_batch_size=1)
    assert metrics.rejected == {"would wait too long": 1}
    assert run(arrivals).finished == 2
    assert run(arrivals, max_batch_size=1, max_queue_wait=5.0).rejected == metrics.rejected


def test_who_has_waited_for_too_long_leaves() -> None:
    short = [Arrival(10.0 * n, 10, 1, max_queue_seconds=900.0) for n in range(50)]
    # All answers were short, so the wait for this one is thought to be short as well.
    long, impatient = Arrival(900.0, 10, 50), Arrival(900.1, 10, 1, max_queue_seconds=20.0)
    metrics = run([*short, long, impatient], max_batch_size=1)
    assert metrics.rejected == {"waited too long": 1}
    assert metrics.finished == 51


def test_a_higher_priority_is_served_first() -> None:
    arrivals = [Arrival(0.0, 10, 50), Arrival(0.1, 10, 1), Arrival(0.2, 10, 1, priority=5)]
    metrics = run(arrivals, max_batch_size=1)
    urgent = run([arrivals[0], arrivals[2]], max_batch_size=1)
    assert metrics.queue.percentile(60) == pytest.approx(urgent.queue.percentile(100))
