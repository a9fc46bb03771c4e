"""Whether a refactoring changed anything that somebody outside can see: `python -m tools.proof --base REVISION`.

The base revision is checked out into a separate worktree. Both trees then answer the same questions, each in processes
that run its code:

- `help`: names, value kinds, choices and defaults of all flags of all commands (their descriptions may change);
- `openapi`: `/openapi.json` without descriptions;
- `metrics`: names and types on `/metrics`, after the same requests;
- `wire`: the descriptor of `generate.proto`;
- `answers`: bodies and status of the same requests, greedy and seeded, on every dialect;
- `journal`: a journal that the base recorded, with draft tokens, adapters, a grammar and a killed shard, replayed by this
  tree bit for bit;
- `contract`: the contract tests of this tree, of which each must pass and none may be missing;
- `tests`: which test functions vanished (a report, never a failure).

`--slow` adds `verify` (`millrace-verify` on the demo model), `quick` (`python -m bench.quick` at its floors) and `router` (the
router's µs a token and memory, in turn, within 3 %).

Differences that a change means to make stand in `tools/proof_intended.txt`: a question, a regular expression for the
difference's line, and the reason, separated by tabs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("proto", "router", "shard", "launcher", "package", "cluster", "tests/support", ".")
INTENDED = ROOT / "tools" / "proof_intended.txt"
START_SECONDS = 180
COMMANDS = (
    ("millrace_launcher",),
    ("millrace_router",),
    ("millrace_router", "replay"),
    ("millrace_shard", "serve"),
    ("millrace_shard", "download-weights"),
    ("millrace_shard", "convert"),
    ("millrace_shard", "reference"),
    ("millrace",),
    ("millrace", "serve"),
    ("millrace", "chat"),
    ("millrace", "bench"),
    ("millrace", "run-batch"),
    ("millrace", "download"),
    ("millrace", "env"),
    ("millrace", "verify"),
    ("millrace", "simulate"),
)
GRAMMAR = {"type": "regex", "value": "(alpha|beta) and then (gamma|delta) follows [0-9]{4}"}


@dataclass(frozen=True)
class Tree:
    """A checkout, whose code runs in child processes with this interpreter."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """Variables for processes of the tree's code."""
        paths = os.pathsep.join(str(self.folder / part) for part in PARTS)
        return {**os.environ, "PYTHONPATH": paths, "COLUMNS": "100", "NO_COLOR": "1"}

    def run(self, *words: str, check: bool = True) -> str:
        """Output of `python words`, standard error included.

        Raises:
            SystemExit: it failed and `check` is set.

        """
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise SystemExit(f"{' '.join(words)} in {self.folder} failed:\n{done.stdout}")
        return done.stdout


@contextmanager
def worktree(revision: str) -> Iterator[Tree]:
    """A checkout of `revision` with generated protobuf code, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="proof-") as parent:
        folder = Path(parent) / "base"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--detach", "--quiet", str(folder), revision], check=True)
        try:
            tree = Tree(folder)
            tree.run("proto/compile.py")
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


class Server:
    """A launcher of the demo model with router and shard, for the length of a block."""

    def __init__(self, tree: Tree, *flags: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="proof-server-")
        path = Path(self._folder.name)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (path / "log").open("w+b")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "millrace_launcher", f"--port={port}", "--json-output"),
                *(f"--shard-uds-path={path / 'shard'}", "--hostname=127.0.0.1"),
                *("--deterministic=on", "--kv-memory=64MiB", *flags),
            ],
            cwd=tree.folder,
            env=tree.environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log(self) -> str:
        """Everything that launcher, router and shard have printed."""
        return Path(self._log.name).read_text()

    def __enter__(self) -> Server:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError):
                if self.send("/health")[0] == 200:
                    return self
            time.sleep(0.1)
        log = self.log()
        self.__exit__()
        raise SystemExit(f"the server did not start:\n{log}")

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def send(self, path: str, body: object = None) -> tuple[int, str]:
        """Status and text of the answer to a GET, or to a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def shard_pid(self) -> int:
        """Process id of the one shard."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for pid in children.read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"millrace_shard" in words or b"millrace_shard.commands.serve" in words:
                return int(pid)
        raise SystemExit("the launcher has no shard among its children")


def flag_shapes(text: str) -> list[str]:
    """Flags with value kinds, choices and defaults in a help text, without their descriptions."""
    text = re.sub(r"-\n\s+", "-", text)
    entries = re.split(r"\n(?=  (?:-|\{))", text)
    shapes = []
    for entry in entries[1:]:
        head = entry.strip().split("\n")[0]
        signature = re.split(r"\s{2,}", head)[0]
        default = re.findall(r"\[([^\[\]]*)\]\s*(?:\n\n|\Z)", re.sub(r"\n\s+", " ", entry) + "\n\n")
        shapes.append(f"{signature} [{default[-1] if default else ''}]")
    return shapes


def helps(tree: Tree) -> dict[str, Any]:
    """Flags by command."""
    answers = {}
    for command in COMMANDS:
        text = tree.run("-m", *command, "--help", check=False)
        answers[" ".join(command)] = flag_shapes(text)
    return answers


def without_words(value: object) -> object:
    """JSON without the keys that hold prose."""
    if isinstance(value, dict):
        words = ("description", "summary", "title", "version", "example", "examples")
        return {
            key: without_words(one)
            for key, one in value.items()
            if key not in words or not isinstance(one, str | list)
        }
    return [without_words(one) for one in value] if isinstance(value, list) else value


def wire(tree: Tree) -> str:
    return tree.run(
        "-c",
        "from millrace_proto import generate_pb2 as pb; from google.protobuf import descriptor_pb2 as d\n"
        "m = d.FileDescriptorProto(); pb.DESCRIPTOR.CopyToProto(m); print(m)",
    )


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = json.loads(
    (ROOT / "tools" / "proof_requests.json").read_text()
)
"""Route and body by name."""
VOLATILE = re.compile(
    r"(chatcmpl|cmpl|resp|msg|call|fc|rs|toolu)[-_][A-Za-z0-9_-]+"
    r'|"(?:created|created_at|completed_at|id|request_id|seed|obfuscation|system_fingerprint)": ?(?:\d+(?:\.\d+)?|"[^"]*"|null)'
)


def served(tree: Tree) -> dict[str, Any]:
    """What one server of the tree answers: the document, the metrics' names, and the answers to `REQUESTS`."""
    with Server(tree) as server:
        answers = {
            name: "{} {}".format(*server.send(path, body)).splitlines()
            for name, (path, body) in REQUESTS.items()
        }
        answers = {
            name: [VOLATILE.sub("-", line) for line in lines] for name, lines in answers.items()
        }
        together = {"inputs": "What is a shard?", "parameters": {"max_new_tokens": 200}}
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: server.send("/generate", together), range(3)))
        document = json.loads(server.send("/openapi.json")[1])
        metrics = sorted(
            set(re.findall(r"^# TYPE (.*)$", server.send("/metrics")[1], re.MULTILINE))
        )
    return {"answers": answers, "openapi": without_words(document), "metrics": metrics}


ADAPTER_SOURCE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder, model = map(Path, sys.argv[1:])
config = json.loads((model / "config.json").read_text())
generator = torch.Generator().manual_seed(5)
size, layers = config["hidden_size"], config["num_hidden_layers"]
shapes = {"q_proj": config["num_attention_heads"] * config["head_dim"], "v_proj": config["num_key_value_heads"] * config["head_dim"]}
tensors = {}
for layer in range(layers):
    for name, width in shapes.items():
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, size, generator=generator) * 0.02
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.02
folder.mkdir()
save_file(tensors, folder / "adapter_model.safetensors")
(folder / "adapter_config.json").write_text(json.dumps({
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(shapes), "bias": "none",
    "task_type": "CAUSAL_LM", "base_model_name_or_path": "demo"}))
"""


def record_journal(tree: Tree, folder: Path) -> tuple[Path, list[str]]:
    """A journal of requests over which the shard is killed, and the flags for its replay."""
    adapter, journal = folder / "adapter", folder / "journal"
    tree.run("-c", ADAPTER_SOURCE, str(adapter), str(tree.folder / "demo" / "model"))
    flags = ["--speculate=3", f"--lora-modules=narrow={adapter}", f"--adapter-cache={folder}/cache"]
    with Server(tree, *flags, f"--journal={journal}", "--journal-tokens") as server:
        bodies = []
        for seed in range(6):
            parameters: dict[str, Any] = {
                "max_new_tokens": 300 if seed else 60,
                "do_sample": seed % 2 == 1,
                "seed": seed,
                "ignore_eos": seed > 0,
            }
            if seed == 0:
                parameters["grammar"] = GRAMMAR
            if seed in {1, 2}:
                parameters["adapter_id"] = "narrow"
            bodies.append({"inputs": f"What is a shard? {seed}", "parameters": parameters})
        answers: list[tuple[int, str]] = []
        kill_among(server, bodies, answers)
        bad = [answer for answer in answers if answer[0] != 200]
        if bad or len(answers) != len(bodies):
            raise SystemExit(f"requests failed while the journal was recorded: {bad}")
    return journal, flags


def kill_among(
    server: Server, bodies: list[dict[str, Any]], answers: list[tuple[int, str]]
) -> None:
    """Send all bodies at once, and kill the shard when tokens have come."""
    is_moving = Event()

    def send(body: dict[str, Any]) -> None:
        answers.append(server.send("/generate", body))

    def follow() -> None:
        data = json.dumps(
            {"inputs": "x", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
        ).encode()
        request = urllib.request.Request(
            server.url + "/generate_stream", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as stream:
            for number, _ in enumerate(stream):
                if number == 60:
                    is_moving.set()

    threads = [Thread(target=send, args=(body,)) for body in bodies] + [Thread(target=follow)]
    for thread in threads:
        thread.start()
    is_moving.wait(120)
    os.kill(server.shard_pid(), signal.SIGKILL)
    for thread in threads:
        thread.join()


def replayed(base: Tree, tree: Tree) -> list[str]:
    """What this tree's replay of the base's journal says, if it is not that all epochs are equal."""
    with tempfile.TemporaryDirectory(prefix="proof-journal-") as folder:
        journal, flags = record_journal(base, Path(folder))
        replay = [*verify_command(tree), "demo/model", "--replay", str(journal), "--", *flags]
        output = tree.run("-m", *replay, "--deterministic=on", check=False)
    epochs = re.findall(r"^ +\d+  \d{4}-.*  (\S.*)$", output, re.MULTILINE)
    if len(epochs) >= 2 and set(epochs) == {"equal"}:
        print(f"journal: {len(epochs)} epochs equal")
        return []
    return output.splitlines()[-20:]


def verify_command(tree: Tree) -> list[str]:
    is_moved = (tree.folder / "package" / "millrace" / "verify").is_dir()
    return ["millrace.verify" if is_moved else "millrace_launcher.verify"]


def collected(tree: Tree) -> set[str]:
    """Names of the test functions, without files and parameters."""
    output = tree.run("-m", "pytest", "--collect-only", "-q", check=False)
    return set(re.findall(r"::(\w+)", output))


def contract(tree: Tree) -> dict[str, str]:
    """Outcome by id of the contract tests."""
    output = tree.run("-m", "pytest", "-q", "-rA", "tests/router/contract", check=False)
    return {
        name.split("/")[-1]: outcome
        for outcome, name in re.findall(
            r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+)", output, re.MULTILINE
        )
    }


def differences(before: object, after: object, path: str = "") -> list[str]:
    """Lines that say where two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = []
        for key in sorted({*before, *after}):
            if key not in after:
                lines.append(f"{path}/{key} is gone")
            elif key not in before:
                lines.append(f"{path}/{key} is new: {json.dumps(after[key])[:200]}")
            else:
                lines += differences(before[key], after[key], f"{path}/{key}")
        return lines
    if isinstance(before, list) and isinstance(after, list) and before != after:
        if all(isinstance(one, str) for one in [*before, *after]):
            gone = [f"{path} - {one}" for one in before if one not in after]
            new = [f"{path} + {one}" for one in after if one not in before]
            return gone + new or [f"{path}: another order"]
        if len(before) == len(after):
            pairs = enumerate(zip(before, after, strict=True))
            return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}/{i}")]
    return [] if before == after else [f"{path}: {before!r:.300} became {after!r:.300}"]


def intended() -> list[tuple[str, re.Pattern[str]]]:
    lines = INTENDED.read_text().splitlines() if INTENDED.exists() else []
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(question, re.compile(pattern)) for question, pattern, _ in rows]


def slow(base: Tree, tree: Tree) -> dict[str, list[str]]:
    """Differences of the questions that take minutes."""
    output = tree.run("-m", *verify_command(tree), "demo/model", check=False)
    answers = {
        "verify": [] if "holds" in output or "equal" in output else output.splitlines()[-20:]
    }
    quick = subprocess.run(
        [sys.executable, "-m", "bench.quick"], cwd=tree.folder, env=tree.environment(), check=False
    )
    answers["quick"] = [f"bench.quick ended with {quick.returncode}"] if quick.returncode else []
    for name, one in (("base", base), ("tree", tree), ("base", base), ("tree", tree)):
        print(f"router, {name}:\n{one.run('-m', 'bench.router', check=False)}")
    return answers


def main() -> int:
    """Ask both trees, print the differences, and return how many questions have some that are not intended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", required=True, help="revision to compare with")
    parser.add_argument("--only", nargs="*", help="questions to ask")
    parser.add_argument("--slow", action="store_true", help="also those that take minutes")
    options = parser.parse_args()
    tree = Tree(ROOT)
    failed = 0
    allowed = intended()
    with worktree(options.base) as base:
        for question, lines in ask(base, tree, options.only, is_slow=options.slow):
            rest = [
                line
                for line in lines
                if not any(name == question and regex.search(line) for name, regex in allowed)
            ]
            failed += bool(rest)
            print(f"{question}: {'equal' if not rest else 'DIFFERENT'}", end="")
            print(f" ({len(lines) - len(rest)} intended)" if len(rest) < len(lines) else "")
            for line in rest:
                print(f"    {line}")
    return failed


def ask(
    base: Tree, tree: Tree, only: list[str] | None, *, is_slow: bool
) -> Iterator[tuple[str, list[str]]]:
    """Questions with the lines that differ."""
    simple: dict[str, Callable[[Tree], object]] = {
        "help": helps,
        "wire": wire,
        "contract": contract,
    }
    for question, ask_tree in simple.items():
        if only is None or question in only:
            yield question, differences(ask_tree(base), ask_tree(tree))
    if only is None or {"answers", "openapi", "metrics"} & set(only):
        before, after = served(base), served(tree)
        for question in ("answers", "openapi", "metrics"):
            yield question, differences(before[question], after[question])
    if only is None or "journal" in only:
        yield "journal", replayed(base, tree)
    if only is None or "tests" in only:
        before_names, after_names = collected(base), collected(tree)
        print(
            f"tests: {len(before_names)} names, now {len(after_names)};"
            f" {len(before_names - after_names)} vanished, {len(after_names - before_names)} new"
        )
    if is_slow:
        yield from slow(base, tree).items()


if __name__ == "__main__":
    sys.exit(main())
