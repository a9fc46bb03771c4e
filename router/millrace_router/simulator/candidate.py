"""What stands for an entry in the simulator: lengths where an entry has tokens, and names for its KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millrace_router.request.acceptance import Acceptance
from millrace_router.request.request import SchedulingParameters

_NUMBERS = [b"%d" % number for number in range(1000)]


class PrefixNames:
    """Names of the blocks that the requests of a group share, each made once."""

    def __init__(self) -> None:
        self._names: dict[str, list[bytes]] = {}

    def first(self, group: str, count: int) -> Sequence[bytes]:
        """Return the names of the first `count` blocks of `group`."""
        names = self._names.setdefault(group, [])
        if len(names) < count:
            prefix = group.encode()
            names += [b"%b/%d" % (prefix, index) for index in range(len(names), count)]
        return names[:count]


class Candidate:
    """A request in the simulated router. It is never closed: a simulated client has patience."""

    __slots__ = (
        "_keys",
        "_num_shared",
        "_prefixes",
        "arrival",
        "last_token_at",
        "max_new_tokens",
        "num_generated",
        "num_preemptions",
        "output_tokens",
        "queued_at",
        "request_id",
        "scheduling",
    )

    closed = False
    wants_prompt_logprobs = False
    max_jump_forward_tokens = 0
    acceptance = Acceptance()

    def __init__(
        self,
        request_id: int,
        arrival: Arrival,
        *,
        scheduling: SchedulingParameters,
        max_new_tokens: int,
        block_size: int,
        prefixes: PrefixNames,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.scheduling = scheduling
        self.queued_at = arrival.arrived_at
        self.max_new_tokens = max_new_tokens
        self.output_tokens = min(arrival.output_tokens, max_new_tokens)
        self.num_generated = 0
        """Tokens it had when it was admitted last, or preempted since."""
        self.num_preemptions = 0
        self.last_token_at: float | None = None
        """When its first token since it was admitted came, or, once it is preempted, its last."""
        self._prefixes = prefixes
        self._num_shared = arrival.prefix_tokens // block_size
        self._keys: list[bytes] = []

    @property
    def tenant(self) -> str:
        """Whose share of the tokens it takes."""
        return self.scheduling.tenant

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.arrival.prompt_tokens

    @property
    def num_inputs(self) -> int:
        """Prompt tokens, and those generated before it was preempted."""
        return self.arrival.prompt_tokens + self.num_generated

    @property
    def num_tokens_left(self) -> int:
        """Tokens that its answer had left when it was admitted last."""
        return self.output_tokens - self.num_generated

    @property
    def may_repeat_blocks(self) -> bool:
        """Whether it may compute a block that is cached already: its group's, or its own after a preemption."""
        return self.num_preemptions > 0 or self.arrival.prefix_tokens >= self.arrival.prompt_tokens

    def block_keys(self, count: int) -> Sequence[bytes]:
        """Names of its first blocks: those of its group as far as that reaches, and its own."""
        keys = self._keys
        if len(keys) < count:
            if len(keys) < self._num_shared:
                shared = self._prefixes.first(self.arrival.group, min(count, self._num_shared))
                keys += shared[len(keys) :]
            own = b"%d." % self.request_id
            keys += [own + index for index in _NUMBERS[len(keys) : count]]
            keys += [own + b"%d" % index for index in range(len(keys), count)]
        return keys[:count]


class Arrival(NamedTuple):
    """One request of a workload."""

    arrived_at: float
    """Seconds on the virtual clock."""
    prompt_tokens: int
    output_tokens: int
    """Tokens after which the model would end by itself."""
    max_new_tokens: int | None = None
    """What the client asks for at most; None leaves it to the server."""
    group: str = ""
    """Requests of one group begin with the same tokens."""
    prefix_tokens: int = 0
    """How many of its first tokens, prompt and answer, are those of its group."""
    priority: int = 0
    tenant: str = ""
    max_queue_seconds: float | None = None
