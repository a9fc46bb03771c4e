"""Links in the docs lead somewhere, and their commands parse."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_testing.project import ROOT, project_files

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "bench/*.md", "demo/*.md")
    for path in ROOT.glob(pattern)
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = {name: place.partition(":")[0] for name, place in PROJECT["scripts"].items()}
MAKEFILE = (ROOT / "Makefile").read_text()
VERBS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^#   ([A-Z_]+)=", MAKEFILE, re.MULTILINE))
SHELLS = ("shell", "bash", "sh", "console")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
IMAGE = re.compile(r'\bsrc="([^"]+)"')
ENVIRONMENT = ".venv/bin/"
"""Where an installation as in the README has its programs."""
OURS = re.compile(
    rf"({re.escape(ENVIRONMENT)})?"
    r"(make|python -m (bench|demo|tests)|(millrace|text-generation)-[a-z]+|millrace [a-z]+)\b"
)
OPERATORS = frozenset("();<>|&\n")
INSTALLED = {*SCRIPTS, "pip", "python", "pytest"}
"""Programs that are in that environment alone."""
SUBCOMMANDS = {
    "millrace.__main__",
    "millrace_launcher.__main__",
    "millrace_shard.__main__",
    "millrace_router.__main__",
}
"""Programs whose first word may be a command of its own."""
FILE_NAME = re.compile(r"[\w./-]+\.(py|cpp|h|md|proto|toml|sh)")
HELP = """
import contextlib, io, json, runpy, sys, warnings
warnings.simplefilter("ignore")
texts = {}
for words in map(str.split, sys.argv[1:]):
    sys.argv = [*words, "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(BaseException):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    texts[" ".join(words)] = text.getvalue()
print(json.dumps(texts))
"""


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: str) -> set[str]:
    """Every anchor of a page; the second heading of one name has the suffix -1."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE):
        found[slug(heading)] = found.get(slug(heading), -1) + 1
    return {
        name if not n else f"{name}-{n}" for name, last in found.items() for n in range(last + 1)
    }


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links of a page in `folder` whose file or anchor does not exist."""
    plain = FENCE.sub("", text)
    broken = []
    for link in (*LINK.findall(plain), *IMAGE.findall(plain)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name
        if not target.exists():
            broken.append(link)
        elif anchor:
            page = target.read_text() if name else text
            if anchor not in anchors(page):
                broken.append(link)
    return broken


def missing_files(text: str, files: str) -> list[str]:
    """Files named as inline code that `files`, one path a line, does not have, in whichever folder."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    named = [span for span in spans if FILE_NAME.fullmatch(span)]
    return [name for name in named if f"/{name}\n" not in files]


def shell_blocks(text: str) -> list[str]:
    """The code blocks of a page that are commands."""
    return [block for language, block in FENCE.findall(text) if language in SHELLS]


def transcripts(text: str) -> list[str]:
    """Commands after a prompt in indented blocks, without the lines that continue them."""
    return re.findall(r"^ {4}\$ (.*?) *\\?$", FENCE.sub("", text), re.MULTILINE)


def not_on_path(text: str) -> list[str]:
    """Programs of ours that a page calls by names which a shell does not find."""
    called = [
        words[1] if words[0] == "$" else words[0]
        for block in (*shell_blocks(text), *transcripts(text))
        for words in commands(block)
    ]
    return [name for name in called if name in INSTALLED]


def our_spans(text: str) -> list[str]:
    """Inline code that calls one of our programs; words in capitals stand for something else."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [span for span in spans if OURS.match(span)]


def commands(block: str) -> Iterator[list[str]]:
    """The words of each simple command, without leading assignments."""
    text = re.sub(r"(^|\s)#.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="".join(OPERATORS))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    for token in (*lexer, "\n"):
        if not set(token) <= OPERATORS:
            words.append(token)
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words
        words = []


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """The Python module that a command runs, with its command if it has several, and its arguments."""
    words = [words[0].removeprefix(ENVIRONMENT), *words[1:]]
    if words[0] in SCRIPTS:
        module, arguments = SCRIPTS[words[0]], words[1:]
    elif words[:2] == ["docker", "run"] and "millrace" in words:
        module, arguments = SCRIPTS["millrace-launcher"], words[words.index("millrace") + 1 :]
    elif words[:2] == ["python", "-m"]:
        module, arguments = words[2], words[3:]
    else:
        return None
    if module in SUBCOMMANDS and arguments and not arguments[0].startswith("-"):
        return f"{module} {arguments[0]}", arguments[1:]
    return module, arguments


def calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every call of one of our programs on a page."""
    for block in (*shell_blocks(text), *our_spans(text)):
        for words in commands(block):
            called = program(words)
            # A word in capitals stands for a name; what tests need is not a program with flags.
            if called is not None and not re.search(
                r"\b[A-Z]+\b|^(tests|millrace_testing)\.|^pytest\b", called[0]
            ):
                yield called


@functools.cache
def help_texts() -> dict[str, str]:
    """The `--help` text of each program that a page calls."""
    named = sorted({called for page in PAGES for called, _ in calls(page.read_text())})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    printed = subprocess.check_output(
        [sys.executable, "-c", HELP, *named], cwd=ROOT, env=environment, text=True
    )
    texts: dict[str, str] = json.loads(printed)
    return texts


def unknown_flags(arguments: list[str], text: str) -> list[str]:
    """Flags that a program's help does not have; those after `--` are another program's."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))
    given = [word.partition("=")[0] for word in arguments if re.match(r"--?[a-zA-Z]", word)]
    return [flag for flag in given if flag not in known]


def unknown_verbs(words: list[str]) -> list[str]:
    """Arguments of make that are neither a verb nor one of its variables."""
    return [
        word
        for word in words
        if word.partition("=")[0] not in (VARIABLES if "=" in word else VERBS)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(), page.parent) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page: Path) -> None:
    text = page.read_text()
    for block in shell_blocks(text):
        parsed = subprocess.run(
            ["bash", "-n"], input=block, capture_output=True, text=True, check=False
        )
        assert (parsed.returncode, parsed.stderr) == (0, ""), block
    for block in (*shell_blocks(text), *our_spans(text)):
        for words in commands(block):
            if words[0] == "make":
                assert unknown_verbs(words[1:]) == [], words
    for called, arguments in calls(text):
        usage = help_texts()[called]
        assert usage.startswith("usage:"), f"{called}: {usage}"
        assert unknown_flags(arguments, usage) == [], (called, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_are_called_where_they_are(page: Path) -> None:
    assert not_on_path(page.read_text()) == []


def test_the_readme_begins_with_the_clone_and_two_verbs() -> None:
    text = (ROOT / "README.md").read_text()
    clone, enter, *rest = [words for block in shell_blocks(text) for words in commands(block)]
    assert clone[:2] == ["git", "clone"]
    assert enter == ["cd", clone[-1]]
    assert rest[:2] == [["make", "serve"], ["make", "test"]]
    assert ["python3", "-m", "venv", ENVIRONMENT.partition("/")[0]] in rest
    assert len(text.splitlines()) <= 110


@pytest.fixture(scope="module")
def files() -> str:
    """Every file of the project, a path a line."""
    return "".join(f"/{name}\n" for name in project_files())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path, files: str) -> None:
    assert missing_files(page.read_text(), files) == []


def test_faults_of_a_page_are_detected(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `two`\n\n## Three\n\n## Three\n")
    good = "[a](other.md) [b](other.md#one-two) [c](other.md#three-1) [d](https://x/y) [e](#here)\n# Here\n"
    assert broken_links(good, tmp_path) == []
    bad = "[a](none.md) ![b](none.png) [c](other.md#two) [d](#there)"
    assert broken_links(bad, tmp_path) == ["none.md", "none.png", "other.md#two", "#there"]
    assert missing_files("`other.md` `room/none.py` `x.y`", "/docs/other.md\n") == ["room/none.py"]
    assert unknown_verbs(["serve", "PORT=1"]) == []
    assert unknown_verbs(["serv", "PART=1"]) == ["serv", "PART=1"]
    page = "```shell\nA=1 millrace serve\n.venv/bin/millrace serve | pip list\nmake serve\n```\n    $ python x\n"
    assert not_on_path(page) == ["millrace", "pip", "python"]
    assert not_on_path("```console\n$ millrace-launcher\n```") == ["millrace-launcher"]
    usage = "usage: x [-p PORT] [--num-shard N]"
    assert unknown_flags(["-p", "1", "--num-shard=2", "--", "--else"], usage) == []
    assert unknown_flags(["--num-shards", "2", "-q"], usage) == ["--num-shards", "-q"]


def test_every_command_on_a_page_is_read() -> None:
    page = """`make test`, `python -m bench.quick --patience 1`
```shell
A=1 millrace-launcher --port 80 \\
  --num-shard 2   # two
docker run -p 80:80 millrace --port 3 | millrace-router replay JOURNAL && millrace-shard serve /m --rank=1
.venv/bin/millrace chat URL --seed 1
```
"""
    assert list(calls(page)) == [
        ("millrace_launcher.__main__", ["--port", "80", "--num-shard", "2"]),
        ("millrace_launcher.__main__", ["--port", "3"]),
        ("millrace_router.__main__ replay", ["JOURNAL"]),
        ("millrace_shard.__main__ serve", ["/m", "--rank=1"]),
        ("millrace.__main__ chat", ["URL", "--seed", "1"]),
        ("bench.quick", ["--patience", "1"]),
    ]
