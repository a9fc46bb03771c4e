"""`python -m bench.faults.chaos`: break the server under load, compare every answer, and audit what is left.

`--scene` picks one of the named campaigns: `kills`, `hangs`, `hand-overs`, `poison`, `crowd`, `overload`, `soak`, or
`all` kinds of faults in random order. Further flags change it: `--scene kills --num-shard 2 --flags=--quantize=int4`.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tokenizers import Tokenizer

from bench.faults.adapters import Adapters
from bench.faults.chaos import report
from bench.faults.chaos.campaign import USUAL, Kind
from bench.faults.chaos.injection import MARK, NUM_MARK_TOKENS
from bench.faults.chaos.run import run
from bench.faults.chaos.scenes import MODELS, SCENES, save_random
from bench.faults.deployment import deployed
from bench.harness.command_line import command, say
from bench.harness.paths import DEMO, OUT, ROOT
from bench.harness.record import Record
from bench.harness.server import LAUNCHER, ServerError

SHARDS = ROOT / "tests" / "support" / "millrace_testing" / "shards"
POISON_LAUNCHER = (str(SHARDS / "shard_launcher.py"), str(SHARDS / "poison_shard.py"))
POISONS = ("kill", "segv", "raise", "hang", "oom")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.chaos", description=__doc__)
    parser.add_argument("--scene", choices=SCENES, default="all")
    chosen, _ = parser.parse_known_args(
        [each for each in arguments if each not in {"-h", "--help"}]
    )
    number, seconds = {"type": _positive}, {"type": float}
    options: tuple[tuple[str, object, Mapping[str, Any], str], ...] = (
        ("--seed", 1, {"type": int}, "of the faults, the requests and their order"),
        ("--requests", 1000, number, "the least number of requests"),
        ("--least-seconds", 0.0, seconds, "of load"),
        ("--seconds", 3600.0, seconds, "inject no faults after this time"),
        ("--faults", 100, {"type": int}, "number of faults"),
        ("--pace", 1.0, seconds, "the longest time before a fault"),
        ("--kinds", USUAL, {"type": _kinds}, "kinds of faults, with commas"),
        ("--poison", "kill", {"choices": POISONS}, "what a poison request does to a shard"),
        ("--clients", 12, number, "in a closed loop"),
        ("--pool", 180, number, "distinct requests"),
        ("--longest", 0, {"type": int}, "most tokens of long streams only; 0: all requests"),
        ("--long", 16, number, "long streams besides"),
        ("--model", "demo", {}, f"a folder, or one of {', '.join(('demo', *MODELS))}"),
        ("--num-shard", 1, number, "ranks"),
        ("--step-timeout", 3.0, seconds, "of the server"),
        ("--max-concurrent", 64, number, "requests that the server accepts at once"),
        ("--kv-tokens", 2048, number, "room of the KV cache"),
        (
            "--fork-servers",
            ("auto",),
            {"type": _words},
            "values of --fork-server, one run for each",
        ),
        ("--flags", [], {"type": shlex.split}, "more flags for the launcher"),
        ("--log", OUT / "chaos.log", {"type": Path}, "of the launcher"),
    )
    for name, default, how, text in options:
        parser.add_argument(name, default=default, help=text, **how)
    adapters = argparse.BooleanOptionalAction
    parser.add_argument("--adapters", action=adapters, default=True, help="of half of the requests")
    parser.add_argument(
        "--record", action="store_true", help="write the figures to bench/results, as JSON"
    )
    parser.set_defaults(**SCENES[chosen.scene])
    found = parser.parse_args(arguments)
    if found.adapters and found.model != "demo":
        parser.error("adapters are of the demo model: add --no-adapters")
    if not found.adapters and any(kind.value.needs_adapters for kind in found.kinds):
        found.kinds = tuple(kind for kind in found.kinds if not kind.value.needs_adapters)
    return found


def launcher_flags(options: argparse.Namespace, adapters: Adapters) -> list[str]:
    """Flags with small limits, so that they are reached, and a short step timeout."""
    return [
        "--deterministic=on",
        f"--step-timeout={options.step_timeout:g}",
        f"--max-concurrent-requests={options.max_concurrent}",
        f"--max-batch-total-tokens={options.kv_tokens}",
        "--graceful-termination-timeout=30",
        *(adapters.flags() if options.adapters else ()),
        *options.flags,
    ]


def poison_environment(model: Path, how: str) -> dict[str, str]:
    """Tell the test shard which tokens are poison, and what they do."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(f"?{MARK}").ids
    poison = ",".join(map(str, ids[-NUM_MARK_TOKENS:]))
    return {"MILLRACE_TEST_POISON": poison, "MILLRACE_TEST_POISON_HOW": how}


def main(arguments: Sequence[str]) -> int:
    """0 when the server recovered from every fault and the audit found nothing."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, _on_sigterm)
    return max(_campaign(options, arguments, how) for how in options.fork_servers)


def _campaign(options: argparse.Namespace, arguments: Sequence[str], fork_server: str) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="millrace-chaos-") as folder:
            adapters = Adapters(Path(folder))
            model = DEMO if options.model == "demo" else Path(options.model)
            if options.model in MODELS:
                model = save_random(Path(folder) / "model", options.model)
            poisons = Kind.POISON in options.kinds
            with deployed(
                model,
                f"--fork-server={fork_server}",
                *launcher_flags(options, adapters),
                log=options.log,
                num_ranks=options.num_shard,
                launcher=POISON_LAUNCHER if poisons else LAUNCHER,
                environment=poison_environment(model, options.poison) if poisons else None,
            ) as server:
                say(f"serving at {server.url}, log in {options.log}")
                outcome = asyncio.run(run(server, options, adapters))
    except ServerError as error:
        say(str(error))
        return 1
    record = Record(
        bench="chaos",
        title=f"Chaos, {options.scene}, seed {options.seed}, fork server {fork_server}",
        command=command("faults.chaos", arguments),
        figures=report.as_json(outcome),
    )
    print(f"\n{record.text(report.text(outcome))}", flush=True)
    if options.record:
        record.write()
    return 1 if outcome.ledger.num_problems or outcome.not_recovered else 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _words(text: str) -> list[str]:
    return text.split(",")


def _kinds(text: str) -> tuple[Kind, ...]:
    names = text.upper().replace("-", "_").split(",")
    known = {kind.name: kind for kind in Kind}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no kind {', '.join(unknown)}; there are {', '.join(known).lower()}"
        )
    return tuple(known[name] for name in names)


def _on_sigterm(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, so that every server is stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
