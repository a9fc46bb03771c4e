"""Third-party clients, each in an environment of its own, against a running server.

A client is a script `clients/FOLDER/NAME_client.py` or `clients/js/NAME_client.mjs`. A Python script runs in the
environment whose name its own begins with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from bench.harness.server import RunningServer, serving
from tests.ecosystem import prepare
from tests.ecosystem.conftest import DEMO_MODEL
from tests.ecosystem.running import run_cases, run_quietly

pytestmark = pytest.mark.ecosystem

CLIENTS = prepare.CLIENTS
DOCUMENT = prepare.ROOT / "docs" / "clients.md"
FORMATS = ["hermes", "llama", "mistral"]
MODULES = {"PYTHONPATH": str(CLIENTS)}


def imported(code: str) -> str:
    """The package that an example imports first."""
    line = code.splitlines()[0]
    quoted = re.search('"(.+)"', line)
    return quoted[1] if quoted else re.split("[ .,]", line)[1]


def names(pattern: str) -> list[str]:
    return sorted(path.stem.removesuffix("_client") for path in CLIENTS.glob(pattern))


def script(name: str) -> str:
    """The path of a client's script in Python, from the folder of all clients."""
    (found,) = CLIENTS.glob(f"*/{name}_client.py")
    return str(found.relative_to(CLIENTS))


def environment_of(name: str) -> str:
    """The longest of the environments' names that the script's begins with."""
    known = (path.stem for path in prepare.REQUIREMENTS.glob("*.txt"))
    if name == "agents":
        return "openai_agents"
    return max((each for each in known if name.startswith(each)), key=len)


def python_or_skip(name: str) -> str:
    environment = environment_of(name)
    python = prepare.interpreter(environment)
    if python is None:
        pytest.skip(f"no .venvs/{environment}: make test-all SUITE=ecosystem makes it")
    return str(python)


def node_or_skip() -> str:
    node = prepare.node()
    if node is None or not (CLIENTS / "js" / "node_modules" / ".package.json").exists():
        pytest.skip("node or its packages are missing: make test-all SUITE=ecosystem installs them")
    return str(node)


@pytest.mark.parametrize("name", names("*/*_client.py"))
def test_a_python_client_passes_its_cases(server: RunningServer, name: str) -> None:
    run_cases([python_or_skip(name), script(name), server.url], CLIENTS, **MODULES)


@pytest.mark.parametrize("name", names("js/*_client.mjs"))
def test_a_javascript_client_passes_its_cases(server: RunningServer, name: str) -> None:
    run_cases([node_or_skip(), f"js/{name}_client.mjs", server.url], CLIENTS, **MODULES)


def examples(language: str) -> list[str]:
    """The blocks of code of that language in the clients' documentation."""
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", examples("python"), ids=imported)
def test_a_documented_python_example_runs(server: RunningServer, code: str) -> None:
    asked = code.replace("http://127.0.0.1:3000", server.url)
    run_quietly([python_or_skip(imported(code)), "-c", asked], CLIENTS, **MODULES)


@pytest.mark.parametrize("code", examples("js"), ids=imported)
def test_a_documented_javascript_example_runs(server: RunningServer, code: str) -> None:
    asked = code.replace("http://127.0.0.1:3000", server.url)
    run_quietly([node_or_skip(), "--input-type=module", "--eval", asked], CLIENTS / "js")


@pytest.fixture(scope="module")
def other_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A launcher that has the flag which the test gives as the fixture's parameter."""
    log = tmp_path_factory.mktemp("launcher") / "launcher.log"
    flags = ["--enable-prefill-logprobs", request.param]
    with serving(DEMO_MODEL, log=log, flags=flags) as running:
        yield running


@pytest.mark.parametrize("other_server", ["--dtype=float32"], indirect=True)
def test_lm_eval_results_match_those_without_a_server(other_server: RunningServer) -> None:
    run_cases([python_or_skip("lm_eval"), "lm_eval_cases.py", other_server.url], CLIENTS, **MODULES)


# The demo model has no format of its own, so that any will do for it.
@pytest.mark.parametrize(
    "other_server", [f"--tool-call-parser={name}" for name in FORMATS], indirect=True
)
def test_the_openai_client_gets_tool_calls_of_every_format(other_server: RunningServer) -> None:
    run_cases(
        [python_or_skip("openai"), script("openai_tools"), other_server.url], CLIENTS, **MODULES
    )


@pytest.mark.parametrize("other_server", ["--strict-tgi"], indirect=True)
@pytest.mark.parametrize("name", ["huggingface_hub", "text_generation"])
def test_tgi_s_clients_pass_their_cases_with_strict_tgi(
    other_server: RunningServer, name: str
) -> None:
    run_cases([python_or_skip(name), script(name), other_server.url], CLIENTS, **MODULES)
