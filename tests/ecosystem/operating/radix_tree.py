"""Feeds Dynamo's RadixTree: a program of the environment `dynamo`, which has nothing of Millrace.

Each line of standard input is JSON: `{"block_size": n}` first, then `{"events": [...]}` in vLLM's arrays, or
`{"find": [token, ...]}`, for which the number of blocks that the tree finds is printed.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from typing import Any

from dynamo.llm import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

WORKER = 7


def converted(event: list[Any], block_size: int) -> object:
    """An event in the form that Dynamo's tree takes; blocks are named by us, and hashed by Dynamo."""
    name, *fields = event
    if name == "AllBlocksCleared":
        return "cleared"
    if name == "BlockRemoved":
        return {"removed": {"block_hashes": fields[0]}}
    hashes, parent, token_ids, *_ = fields
    tokens = compute_block_hash_for_seq(token_ids, block_size)
    blocks = [
        {"block_hash": block, "tokens_hash": of_tokens}
        for block, of_tokens in zip(hashes, tokens, strict=True)
    ]
    return {"stored": {"parent_hash": parent, "blocks": blocks}}


def main() -> None:
    """Serve standard input."""
    tree, numbers, block_size = RadixTree(), count(), 0
    for line in sys.stdin:
        asked = json.loads(line)
        block_size = asked.get("block_size", block_size)
        for event in asked.get("events", ()):
            data = converted(event, block_size)
            told = {"event_id": next(numbers), "data": data, "dp_rank": 0}
            tree.apply_event(WORKER, json.dumps(told).encode())
        if "find" in asked:
            scores = tree.find_matches(compute_block_hash_for_seq(asked["find"], block_size)).scores
            sys.stdout.write(f"{max(scores.values(), default=0)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
