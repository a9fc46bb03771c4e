"""`python -m bench.gguf`: one GGUF file on our server and on llama.cpp's, in turn.

Prompts are made of words that are one token each in the file's vocabulary, so that both servers compute as many tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from tokenizers import Tokenizer

from bench.comparison.plan import Plan
from bench.comparison.report import level_table, levels_json
from bench.comparison.served import run_levels
from bench.harness.command_line import command, run_parser, say
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.harness.server import ServerError
from bench.parts.texts import Texts
from bench.peers.engines import OURS
from bench.peers.servers import HELD, HELP, servers_held_to
from millrace.load.levels import Level, closed, parse_level
from millrace_proto.cores import usable_cores
from millrace_shard.variables import Variables
from millrace_shard.weights.hub import HubSettings, resolve

PEER = "llama.cpp"
LEVELS = (
    closed(1, 16, 128, rounds=3),
    closed(8, 16, 128, rounds=1),
    closed(32, 16, 128, rounds=1),
    closed(1, 512, 4, rounds=8),
)
"""One stream, 8 and 32 streams that decode nearly all of their time, and the first token of a longer prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordLevel(Level):
    """A level whose prompts are drawn from `vocabulary`."""

    vocabulary: tuple[str, ...]

    @classmethod
    def of(cls, level: Level, vocabulary: tuple[str, ...]) -> WordLevel:
        """The same level with these words."""
        values = {field.name: getattr(level, field.name) for field in fields(level)}
        return cls(**values, vocabulary=vocabulary)

    def prompts(self) -> Iterator[str]:
        """The prompts in order; they depend on name, seed and position alone."""
        for number in range(self.num_requests):
            generator = random.Random(f"{self.name}/{self.seed}/{number}")
            yield "".join(generator.choices(self.vocabulary, k=self.prompt_tokens))


def check_lengths(levels: Sequence[WordLevel], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a prompt of another number of tokens than its level says."""
    for level in levels:
        for prompt in level.prompts():
            found = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
            if found != level.prompt_tokens:
                raise ValueError(f"a prompt of {level.name} has {found} tokens")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("gguf", __doc__, patience=120.0)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a published model")
    parser.add_argument("--levels", nargs="+", type=parse_level, default=list(LEVELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", nargs="*", default=[PEER], choices=[PEER])
    parser.add_argument("--instruction-set", choices=tuple(HELD), help=HELP)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Record:
    """Measure every level on both servers. Raises ServerError or ValueError when ours fails."""
    folder = resolve(options.model, revision=None, settings=HubSettings.of(Variables()))
    file = (folder / "model.gguf").resolve()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = tuple(f" {word}" for word in Texts(tokenizer).words)
    levels = [WordLevel.of(level, words) for level in options.levels]
    check_lengths(levels, tokenizer)
    names = [OURS, *options.peer]
    servers = [each for each in servers_held_to(options.instruction_set) if each.name in names]
    for name in (each.name for each in servers if not each.is_installed):
        say(f"{name} is not installed")
    plan = Plan(
        engines=(),
        repeats=options.repeats,
        threads=usable_cores(),
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
        more_servers=[each for each in servers if each.is_installed],
    )
    notes: list[str] = []
    measurements = run_levels(file, levels, plan, notes)
    record = Record(
        bench="gguf",
        title=f"{file.name} against {PEER}",
        command=command("gguf"),
        figures={
            "file": file.name,
            "file_bytes": file.stat().st_size,
            "measurements": levels_json(measurements),
            "notes": notes,
        },
    )
    record.save(options.out / "gguf.json")
    lines = [f"{file.name}, {file.stat().st_size / 1e6:.0f} MB:", level_table(measurements)]
    print(record.text("\n\n".join([*lines, *(f"Note: {note}" for note in notes)])))
    return record


def main() -> int:
    """Exit code 1 when ours did not run."""
    options = parse_arguments(sys.argv[1:])
    try:
        record = run(options)
    except (ServerError, ValueError) as error:
        print(error)
        return 1
    if options.record:
        record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
