"""Records of requests whose steps failed with other requests and alone, and the refusal of equal requests."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

from millrace_proto.sampling import NO_RULES
from millrace_router.request.request import SchedulingParameters, ValidRequest

REFUSED_SECONDS = 600.0
"""How long equal requests are refused. Clients retry much sooner; after this time restarted shards may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    refused_until: float
    key: bytes
    num_prompt_tokens: int
    description: dict[str, object]


class Quarantine:
    """The latest quarantined requests, without text or token ids."""

    def __init__(self, *, capacity: int = 100, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep the latest `capacity` records; `clock` counts seconds."""
        self.on_added: Callable[[], None] = lambda: None
        """Called after each new record."""
        self._records: deque[_Record] = deque(maxlen=capacity)
        self._clock = clock

    def learned(self) -> list[dict[str, Any]]:
        """Return the records, the oldest first, in types of JSON, for `resume`."""
        return [{**asdict(record), "key": record.key.hex()} for record in self._records]

    def resume(self, learned: Iterable[Mapping[str, Any]]) -> None:
        """Add the result of `learned`, of a process with the same clock.

        Raises:
            KeyError, TypeError, ValueError: it is no such result.

        """
        records = [_Record(**{**one, "key": bytes.fromhex(one["key"])}) for one in learned]
        self._records.extend(records)

    def add(self, request: ValidRequest, *, num_generated: int, reason: str) -> None:
        """Record `request`, whose steps failed after `num_generated` tokens of its answer."""
        self._records.append(
            _Record(
                refused_until=self._clock() + REFUSED_SECONDS,
                # A request that fails before its first token fails with every seed.
                key=_key(request, has_seed=num_generated > 0),
                num_prompt_tokens=len(request.input_ids),
                description=_describe(request, num_generated=num_generated, reason=reason),
            )
        )
        self.on_added()

    def refuses(self, request: ValidRequest) -> bool:
        """Return whether a request with the same prompt and parameters was added in the last `REFUSED_SECONDS`.

        The seed counts if the request had generated a token; the scheduling parameters never count.
        """
        now, length = self._clock(), len(request.input_ids)
        keys = {
            record.key
            for record in self._records
            if record.num_prompt_tokens == length and now < record.refused_until
        }
        return bool(keys) and not keys.isdisjoint(
            _key(request, has_seed=has_seed) for has_seed in (False, True)
        )

    def to_json(self) -> list[dict[str, object]]:
        """Describe each record, the newest first."""
        return [record.description for record in reversed(self._records)]


def _describe(request: ValidRequest, *, num_generated: int, reason: str) -> dict[str, object]:
    return {
        "when": time.time(),
        "reason": reason,
        "prompt_sha256": _prompt_hash(request).hex(),
        "prompt_tokens": len(request.input_ids),
        "generated_tokens": num_generated,
        "parameters": {
            **asdict(request.sampling),
            "bias": len(request.sampling.bias),
            "rules": request.sampling.rules != NO_RULES,
            "adapter_sha256": None if request.adapter is None else request.adapter.digest,
            "grammar": None if request.grammar is None else request.grammar.kind,
            "max_new_tokens": request.max_new_tokens,
            "min_new_tokens": request.min_new_tokens,
            "stop_sequences": len(request.stop_sequences),
            "stop_token_ids": len(request.stop_token_ids),
            "ignore_eos": request.ignore_eos,
            "top_n_tokens": request.top_n_tokens,
            "prefill_logprobs": request.prefill_logprobs,
            "prompt_top_n_tokens": request.prompt_top_n_tokens,
        },
    }


def _prompt_hash(request: ValidRequest) -> bytes:
    """SHA-256 over the token ids, each four bytes in this machine's order."""
    return sha256(array("I", request.input_ids).tobytes()).digest()


def _key(request: ValidRequest, *, has_seed: bool) -> bytes:
    """Return a hash of prompt and parameters; the seed is one of them with `has_seed`, if the request samples."""
    seed = request.sampling.seed if has_seed and request.sampling.samples else None
    adapter = None if request.adapter is None else request.adapter.digest
    parameters = replace(
        request,
        input_ids=(),
        scheduling=SchedulingParameters(),
        # The name of an adapter does not matter, its digest does.
        adapter=None,
        # A function, whose repr is another one in each process.
        answer_text=None,
        # Where its tokens are recorded.
        choice=None,
        sampling=replace(request.sampling, seed=0),
    )
    return sha256(_prompt_hash(request) + repr((parameters, seed, adapter)).encode()).digest()
