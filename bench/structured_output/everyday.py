"""`python -m bench.structured_output.everyday`: how many answers under plain schemas are whole and valid.

Each of the 50 schemas in `everyday.json`, as people write them for extraction, classification and small records, is
sent to `/v1/chat/completions` with its question: once greedy, and sampled with some seeds. `jsonschema` validates the
answers; a property that the schema does not list counts as a violation. `--url` measures a server that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench.harness.client import HttpClient
from bench.harness.command_line import command, run_parser, say
from bench.harness.record import Record
from bench.harness.server import ServerError, serving
from bench.harness.tables import markdown
from bench.structured_output.schemas import problem

Schema = dict[str, Any]

NAME = "structured_output.everyday"
EVERYDAY = Path(__file__).with_suffix(".json")
MAX_TOKENS, NUM_CLIENTS, NUM_SEEDS = 200, 8, 3
CUT, INVALID = "cut off", "invalid"
ENDED, CLOSED = "ended by the model", "closed at the limit"
OUTCOMES = (ENDED, CLOSED, CUT, INVALID)
WHOLE = (ENDED, CLOSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of one request."""

    mode: str
    outcome: str
    num_tokens: int
    schema: Schema
    text: str


def everyday() -> list[tuple[str, Schema]]:
    """Questions and their schemas."""
    return [(each["prompt"], each["schema"]) for each in json.loads(EVERYDAY.read_text())]


def closed(schema: object) -> object:
    """The schema in which only the listed properties are valid, at every level."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: closed(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict):
        changed.setdefault("additionalProperties", False)
    return changed


def outcome_of(text: str, finish_reason: str, schema: Schema) -> str:
    """One of `OUTCOMES`."""
    wrong = problem(text, closed(schema))
    if wrong is None:
        return ENDED if finish_reason == "stop" else CLOSED
    return CUT if wrong.startswith("no JSON") and finish_reason == "length" else INVALID


def body_of(prompt: str, schema: Schema, seed: int | None, max_tokens: int) -> Schema:
    """A chat; greedy without a seed."""
    return {
        "model": "any",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
        **({"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}),
    }


async def ask_all(url: str, *, num_seeds: int, max_tokens: int) -> list[Answer]:
    """Every question greedy, and with each seed. Raises ServerError."""
    seeds: list[int | None] = [None, *range(num_seeds)]
    left, answers = iter(list(product(seeds, everyday()))), list[Answer]()

    async def ask(client: HttpClient) -> None:
        for seed, (prompt, schema) in left:
            status, answer = await client.json(
                "/v1/chat/completions", body_of(prompt, schema, seed, max_tokens)
            )
            if status != 200:
                raise ServerError(f"status {status}: {answer}")
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
            answers.append(
                Answer(
                    mode="greedy" if seed is None else "sampled",
                    outcome=outcome_of(text, choice["finish_reason"], schema),
                    num_tokens=answer["usage"]["completion_tokens"],
                    schema=schema,
                    text=text,
                )
            )

    async with HttpClient(url) as client:
        await asyncio.gather(*(ask(client) for _ in range(NUM_CLIENTS)))
    return answers


def table(answers: Sequence[Answer]) -> Mapping[str, Mapping[str, float]]:
    """Shares of the outcomes for each mode."""
    rows = {}
    for mode in ("greedy", "sampled"):
        of_mode = [answer for answer in answers if answer.mode == mode]
        if not of_mode:
            continue
        found = Counter(answer.outcome for answer in of_mode)
        shares = {outcome: found[outcome] / len(of_mode) for outcome in OUTCOMES}
        rows[mode] = {
            "answers": float(len(of_mode)),
            "whole and valid": sum(shares[outcome] for outcome in WHOLE),
            **shares,
        }
    return rows


def shown(rows: Mapping[str, Mapping[str, float]]) -> str:
    """`rows` as a Markdown table."""
    titles = list(next(iter(rows.values())))
    formats = {title: ".0f" if title == "answers" else ".3f" for title in titles}
    lines = [
        (mode, *(f"{value:{formats[title]}}" for title, value in row.items()))
        for mode, row in rows.items()
    ]
    return markdown(("", *titles), lines)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser(NAME, __doc__)
    parser.add_argument(
        "--model", default="smollm2", help="a chat model: a folder, a GGUF file, smollm2"
    )
    parser.add_argument("--url", help="a server that runs already, in place of --model")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="sampled answers a schema")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--show", action="store_true", help="print answers that are not whole")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Record:
    """Ask everything. Raises ServerError."""
    with ExitStack() as stack:
        url = options.url
        if url is None:
            log = options.out / "everyday.log"
            url = stack.enter_context(serving(Path(options.model), log=log)).url
        began = time.perf_counter()
        asked = ask_all(url, num_seeds=options.seeds, max_tokens=options.max_tokens)
        answers = asyncio.run(asked)
        seconds = time.perf_counter() - began
    for answer in answers:
        if options.show and answer.outcome not in WHOLE:
            say(f"{answer.outcome}, {answer.mode}: {json.dumps(answer.schema)}\n{answer.text}\n")
    rows = table(answers)
    say(f"{sum(answer.num_tokens for answer in answers)} tokens in {seconds:.0f} s")
    record = Record(
        bench=NAME,
        title=f"everyday schemas, {options.model}, {options.max_tokens} tokens",
        command=command(NAME),
        figures=rows,
    )
    print(record.text(shown(rows)))
    return record


def main() -> int:
    """Exit code 1 when a request failed."""
    options = parse_arguments(sys.argv[1:])
    try:
        record = run(options)
    except ServerError as error:
        print(error)
        return 1
    if options.record:
        record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
