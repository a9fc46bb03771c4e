"""Hypothesis strategies for schedules: policies, and requests that share beginnings."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from millrace_proto.sampling import Sampling
from millrace_router.request.request import Grammar, GrammarKind, SchedulingParameters, ValidRequest
from millrace_router.scheduler.step_plan import Budgets
from millrace_testing.adapters.fake_adapters import version_of
from millrace_testing.shards.hash_tokens import POISON_TOKEN_ID, expected_tokens

MAX_PROMPT = 24
MAX_NEW = 20
VERSIONS = [version_of("a"), version_of("a", number=1), version_of("b", num_pages=2)]
"""Two versions of one adapter, and another one."""
ANY_TEXT = Grammar(GrammarKind.REGEX, ".*")
"""A fake shard only needs that there is a grammar."""

policies = st.builds(
    Budgets,
    max_batch_prefill_tokens=st.integers(1, 12) | st.just(40),
    max_batch_size=st.integers(2, 6),
    spare_slots=st.integers(0, 2),
    reserve_all=st.sampled_from([False, False, False, True]),
    max_preemptions=st.integers(0, 3),
    share_slots=st.sampled_from([False, False, True]),
    shortest_first=st.booleans(),
    max_draft_tokens=st.sampled_from([0, 0, 1, 4]),
)


@st.composite
def prompts(draw: st.DrawFn, longest: int) -> tuple[int, ...]:
    """Prompts with few beginnings, so that many are shared, and own ends; some have a poison token."""
    shared = [draw(st.sampled_from([1, 2]))] * draw(
        st.integers(0, 4) | st.integers(0, MAX_PROMPT - 4)
    )
    own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    poison = [POISON_TOKEN_ID] if draw(st.integers(0, 19)) == 0 else []
    return tuple((shared + poison + own)[:longest])


@st.composite
def valid_requests(
    draw: st.DrawFn, *, longest: int, capacity: int, eos_every: int, adapters: bool = False
) -> ValidRequest:
    """A valid request: its KV fits if it runs alone. With `adapters` it may have one of `VERSIONS`."""
    prompt = draw(prompts(longest))
    most = max(1, min(MAX_NEW, capacity + 1 - len(prompt)))
    count = draw(st.integers(1, most) | st.just(most))
    seed = draw(st.sampled_from([0, 0, 0, 7]))
    adapter = draw(st.sampled_from([None, *VERSIONS])) if adapters else None
    digest = "" if adapter is None else adapter.digest
    tokens = expected_tokens(prompt, count, adapter=digest, seed=seed, eos_every=eos_every)
    stops = [f"w{a} w{b}" for a, b in pairwise(tokens[1:])]
    return ValidRequest(
        input_ids=prompt,
        max_new_tokens=count,
        sampling=Sampling(seed=seed, do_sample=seed > 0),
        stop_sequences=(draw(st.sampled_from(stops)),)
        if stops and draw(st.integers(0, 3)) == 0
        else (),
        prefill_logprobs=draw(st.integers(0, 2)) == 0,
        prompt_top_n_tokens=draw(st.integers(0, 2)),
        min_new_tokens=draw(st.sampled_from([0, 0, 3])),
        grammar=draw(st.sampled_from([None, None, None, ANY_TEXT])),
        adapter=adapter,
        scheduling=SchedulingParameters(
            priority=draw(st.sampled_from([-10, 0, 0, 10])),
            tenant=draw(st.sampled_from(["", "", "other"])),
        ),
    )
