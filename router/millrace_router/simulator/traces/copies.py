"""A trace many times over: as many times the load, of as many times the content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from operator import attrgetter
from random import Random

from millrace_router.simulator.simulated_request import Arrival


def copied(arrivals: Iterator[Arrival], copies: int) -> Iterator[Arrival]:
    """Yield the requests of so many copies in order; one copy is the trace as it is.

    Copies begin at times spread over the length of the trace, and what would come after its end comes at its beginning,
    so the load is even from beginning to end. They share no prompts. Each begins at a random time of its part of that
    length: at equal distances the requests of all copies would come in an order that repeats, and a policy that sends
    requests in turn would give a replica the same few requests of each copy.
    """
    if copies == 1:
        yield from arrivals
        return
    trace = list(arrivals)
    if not trace:
        return
    random = Random("copies")  # noqa: S311
    span = trace[-1].arrived_at * (1 + 1 / len(trace))
    num_ids = 1 + max((max(arrival.chain) for arrival in trace if arrival.chain), default=0)
    yield from merge(
        *(
            _copy(trace, copy, (copy + random.random()) * span / copies, span, num_ids)
            for copy in range(copies)
        ),
        key=attrgetter("arrived_at"),
    )


def _copy(
    trace: Sequence[Arrival], copy: int, shift: float, span: float, num_ids: int
) -> Iterator[Arrival]:
    wrapped = next(
        (place for place, each in enumerate(trace) if each.arrived_at + shift >= span), len(trace)
    )
    for part, offset in ((trace[wrapped:], shift - span), (trace[:wrapped], shift)):
        for arrival in part:
            yield arrival._replace(
                arrived_at=arrival.arrived_at + offset,
                chain=tuple([number + copy * num_ids for number in arrival.chain]),
                group=arrival.group and f"{arrival.group}~{copy}",
            )
