"""Checks a model: starts one server at a time and asks each the requests of the first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from millrace.errors import StartError
from millrace.server import LocalServer, LocalServers, NoShard
from millrace.verify import cases
from millrace.verify.adapters import adapter_flags, adapters
from millrace.verify.cases import ServerUnderTest
from millrace.verify.client import Client, ServerError
from millrace.verify.options import CASES, Options
from millrace.verify.questions import PROMPTS, read_prompts
from millrace.verify.reference import NoReference, Reference
from millrace.verify.report import Report, Row, unchecked
from millrace.verify.suite import (
    ServerInfo,
    Suite,
    ask_alone,
    questions_for,
    unrelated_questions,
)
from millrace_launcher.demo import demo_folder

CHANGES_THE_MODEL = ("--quantize", "--rope-scaling", "--rope-factor")
"""Flags that make a server compute another model than `transformers` does with the checkpoint."""
FIRST = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case and its server."""

    name: str
    server: str
    """Cases with the same server run on it in a row."""
    flags: Callable[[Suite], tuple[str, ...]]
    check: Callable[[ServerUnderTest, Suite], Iterator[Row]]
    refusals: tuple[str, ...] = ()
    """Texts in the log of a server that does not support these flags; the case is then not checked."""


class NoServer(Exception):  # noqa: N818
    """The first server did not start or did not answer, so there are no expected answers."""


def verify_model(options: Options, servers: LocalServers) -> Report:
    """Run every requested case. Raises NoServer or PromptsError."""
    prompts = PROMPTS if options.prompts is None else read_prompts(options.prompts)
    planned = plan(options, servers)
    rows: list[Row] = []
    log_progress("starting a server that answers each request alone")
    try:
        with servers.running(FIRST, *cases.ALONE) as local:
            server = _under_test(local, options)
            suite = suite_of(server.client, options, prompts)
            for answer in suite.expected:
                if answer.error is not None:
                    raise ServerError(f"a request that ran alone failed: {answer.error}")
            if suite.info.dtype == "float32":
                planned = _on_first(planned, "transformers")
            for case in (case for case in planned if case.server == FIRST):
                rows += _checked(case, server, suite, options)
    except (StartError, ServerError) as error:
        raise NoServer(f"{error}\n{getattr(error, 'log', '')}".rstrip()) from error
    others = (case for case in planned if case.server != FIRST)
    for name, group in groupby(others, key=lambda case: case.server):
        rows += _on_server(name, list(group), servers, suite, options)
    order = list(CASES)
    return Report(suite.info, tuple(sorted(rows, key=lambda row: order.index(row.case))))


def plan(options: Options, servers: LocalServers) -> list[Case]:
    """The requested cases, in groups that share a server."""
    model = servers.model or str(demo_folder())
    reference = Reference(
        model=model,
        max_new_tokens=options.max_new_tokens,
        revision=options.revision,
    )
    every = (
        Case(name="batched", server=FIRST, flags=_fixed(), check=cases.batched),
        Case(name="chunked", server="chunked", flags=cases.chunked_flags, check=cases.chunked),
        Case(name="cached", server="cached", flags=_fixed(*cases.CACHED), check=cases.cached),
        Case(name="restarted", server="cached", flags=_fixed(*cases.CACHED), check=cases.restarted),
        Case(
            name="preempted",
            server="preempted",
            flags=cases.preempted_flags,
            check=cases.preempted,
        ),
        Case(
            name="speculated",
            server="speculated",
            flags=_fixed(f"--speculate={options.speculate}"),
            check=cases.speculated,
            refusals=("--speculate",),
        ),
        Case(
            name="tensor-parallel",
            server="tensor-parallel",
            flags=_fixed(*cases.ALONE, f"--num-shard={options.num_shard}"),
            check=cases.tensor_parallel,
            refusals=("one shard only", "shards cannot share", "NotEnoughCUDADevices"),
        ),
        Case(
            name="adapters",
            server="adapters",
            flags=lambda _: adapter_flags(servers, model),
            check=adapters,
            refusals=("no linear layers of known names", "--enable-lora"),
        ),
        Case(
            name="transformers",
            server="float32",
            flags=_fixed(*cases.ALONE, "--dtype=float32"),
            check=partial(cases.transformers, reference=reference),
        ),
    )
    return [case for case in every if case.name in options.cases]


def log_progress(words: str) -> None:
    """Show progress on stderr, since stdout has the report alone."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def _under_test(server: LocalServer, options: Options) -> ServerUnderTest:
    return ServerUnderTest(Client(server.url, options.api_key), server.kill_shard)


def suite_of(client: Client, options: Options, prompts: Sequence[str]) -> Suite:
    """The requests for a server, and its answers to them, one at a time. Raises ServerError."""
    info = ServerInfo.of(client)
    questions = questions_for(
        client,
        info,
        prompts,
        num_requests=options.num_requests,
        max_new_tokens=options.max_new_tokens,
        cut=options.prompts is None,
    )
    unrelated = unrelated_questions(client, info)
    log_progress(f"asking {len(questions)} requests, one at a time")
    expected = ask_alone(client, questions)
    return Suite(info=info, questions=questions, unrelated=unrelated, expected=expected)


def _on_server(
    name: str, group: list[Case], servers: LocalServers, suite: Suite, options: Options
) -> Iterator[Row]:
    """The rows of all cases that share a server, or of the reason why it did not start."""
    runnable = []
    for case in group:
        reason = _senseless(case, options)
        if reason is None:
            runnable.append(case)
        else:
            yield unchecked(case.name, case.name, reason, asked_for=options.chosen)
    if not runnable:
        return
    log_progress(f"starting a server: {name}")
    try:
        with servers.running(name, *group[0].flags(suite)) as local:
            server = _under_test(local, options)
            for case in runnable:
                yield from _checked(case, server, suite, options)
    except StartError as error:
        for case in runnable:
            refused = any(words in error.log for words in case.refusals)
            yield unchecked(
                case.name, case.name, str(error), asked_for=options.chosen or not refused
            )


def _checked(case: Case, server: ServerUnderTest, suite: Suite, options: Options) -> list[Row]:
    """The rows of one case; a failure is a red row."""
    reason = _senseless(case, options)
    if reason is not None:
        return [unchecked(case.name, case.name, reason, asked_for=options.chosen)]
    log_progress(f"checking: {CASES[case.name]}")
    try:
        _check_kernels(server, suite)
        rows = list(case.check(server, suite))
    except (ServerError, NoShard, NoReference) as error:
        rows = [unchecked(case.name, case.name, str(error), asked_for=True)]
    for row in rows:
        log_progress(f"  {row.title}: {row.verdict.value}")
    return rows


def _check_kernels(server: ServerUnderTest, suite: Suite) -> None:
    """Raise ServerError if a server has other kernels than the first, for instance because compiling failed."""
    found, first = ServerInfo.of(server.client), suite.info
    if found.dtype == first.dtype and found.attention != first.attention:
        raise ServerError(
            f"this server has {found.attention} attention, the first one {first.attention}; its log may say why"
        )
    if found.dtype == first.dtype and found.activations != first.activations:
        raise ServerError(
            f"this server has {found.activations or 'plain'} activations, the first one"
            f" {first.activations or 'plain'} ones; --quantize-activations fixes them"
        )


def _senseless(case: Case, options: Options) -> str | None:
    """The reason why a case makes no sense with the user's flags, or None."""
    if case.name != "transformers":
        return None
    changed = [f for f in options.flags if f.partition("=")[0] in CHANGES_THE_MODEL]
    return f"{changed[0]} makes another model of the checkpoint" if changed else None


def _on_first(planned: list[Case], name: str) -> list[Case]:
    """Let the first server run the case `name` as well."""
    return [replace(case, server=FIRST) if case.name == name else case for case in planned]


def _fixed(*flags: str) -> Callable[[Suite], tuple[str, ...]]:
    return lambda _: flags
