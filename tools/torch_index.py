"""`python tools/torch_index.py`: print what PIP_EXTRA_INDEX_URL should be, so that pip finds the right build of torch.

pip's default index has the CUDA build, which is gigabytes that a machine without an NVIDIA GPU cannot use. PyTorch's
CPU index is asked once, within `SECONDS` in all, because pip itself retries an index that it cannot reach for minutes.
The choice is one line on stderr. `TORCH_INDEX=URL` in the environment makes it; an empty one means pip's default.

It runs before anything is installed, so it needs only the standard library and pip.
"""

from __future__ import annotations

import ast
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 3.0
MOST_BYTES = 2**16
"""As much of the index's page of torch is read; it begins with links to wheels."""


@dataclass(frozen=True)
class PipSettings:
    """What pip's files and `PIP_*` variables say of indexes and of the way to them."""

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    has_no_index: bool = False
    proxy: str = ""
    certificates: str = ""
    trusted_hosts: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> PipSettings:
        """Return the settings that this interpreter's pip uses for `pip install`."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
        return cls.parse(listed.stdout)

    @classmethod
    def parse(cls, listed: str) -> PipSettings:
        """Return the settings in the output of `pip config list`, such as `:env:.proxy='http://a'`."""
        values: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
        for line in listed.splitlines():
            name, _, text = line.partition("=")
            section, _, key = name.rpartition(".")
            if section in values and (value := str(ast.literal_eval(text))):
                values[section][key] = value
        merged = values["global"] | values["install"] | values[":env:"]
        return cls(
            index_url=merged.get("index-url", ""),
            extra_index_urls=tuple(merged.get("extra-index-url", "").split()),
            has_no_index=merged.get("no-index", "").lower() in {"1", "true", "yes", "on", "y", "t"},
            proxy=merged.get("proxy", ""),
            certificates=merged.get("cert", ""),
            trusted_hosts=tuple(merged.get("trusted-host", "").split()),
        )

    def trusts(self, host: str) -> bool:
        """Whether pip would not check the certificate of `host`, which is `name` or `name:port`."""
        return bool({host, host.partition(":")[0]} & set(self.trusted_hosts))


@dataclass(frozen=True)
class Choice:
    """An index in addition to pip's configured ones, or none, and the reason in words."""

    index: str | None
    reason: str


def choose(
    environment: Mapping[str, str],
    settings: PipSettings,
    *,
    root: Path = Path("/"),
    cpu_index: str = CPU_INDEX,
    seconds: float = SECONDS,
) -> Choice:
    """Return the index for torch on this machine.

    Args:
        environment: `TORCH_INDEX`, and `PATH` for nvidia-smi.
        settings: pip's own.
        root: where /dev and /proc are.
        cpu_index: PyTorch's index of CPU builds.
        seconds: how long that index has to answer, in all.

    """
    override = environment.get("TORCH_INDEX")
    if override is not None:
        text = "TORCH_INDEX is this URL" if override else "TORCH_INDEX is empty"
        return Choice(override or None, text)
    if settings.has_no_index:
        return Choice(None, "pip's configuration allows no index")
    if has_nvidia_gpu(environment.get("PATH", os.defpath), root):
        return Choice(None, "this machine has an NVIDIA GPU")
    if not sys.platform.startswith("linux"):
        return Choice(None, "it has CPU builds for this system")
    configured = {url.rstrip("/") for url in (settings.index_url, *settings.extra_index_urls)}
    if cpu_index in configured:
        return Choice(None, "pip's configuration names PyTorch's CPU index")
    problem = ask(cpu_index, settings, seconds)
    if problem is None:
        return Choice(
            cpu_index, "no NVIDIA GPU here, and this index answers; TORCH_INDEX= changes it"
        )
    return Choice(
        None, f"no NVIDIA GPU here, but {cpu_index} {problem}; TORCH_INDEX=URL names another"
    )


def has_nvidia_gpu(path: str, root: Path) -> bool:
    """Whether the programs on `path`, or the devices below `root`, belong to an NVIDIA GPU."""
    return (
        shutil.which("nvidia-smi", path=path) is not None
        or (root / "proc/driver/nvidia").exists()
        or any((root / "dev").glob("nvidia*"))
    )


def ask(index: str, settings: PipSettings, seconds: float) -> str | None:
    """Return None when `index` lists wheels of torch within `seconds`, else what it did instead.

    A name server, a proxy or a trickle of bytes can each take longer than a socket's timeout, so a daemon thread
    sends the request.
    """
    problems = [f"did not answer within {seconds:g} s"]

    def fetch() -> None:
        try:
            problems.append(
                "" if _lists_torch(index, settings, seconds) else "has no wheels of torch"
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, pip's default remains
            problems.append(f"cannot be used: {' '.join(str(error).split())}")

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    return problems[-1] or None


def _lists_torch(index: str, settings: PipSettings, seconds: float) -> bool:
    """Whether the page of torch links to wheels, asked as pip would."""
    certificates = settings.certificates or os.environ.get("REQUESTS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=certificates)
    if settings.trusts(urlsplit(index).netloc):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    proxies = dict.fromkeys(("http", "https"), settings.proxy) if settings.proxy else None
    opener = build_opener(ProxyHandler(proxies), HTTPSHandler(context=context))
    request = Request(f"{index}/torch/", headers={"accept": "text/html"})  # our URL
    with opener.open(request, timeout=seconds) as response:
        page: bytes = response.read(MOST_BYTES)
    return b".whl" in page


def main() -> None:
    """Print the indexes for PIP_EXTRA_INDEX_URL, with pip's configured ones, and the choice."""
    settings = PipSettings.read()
    choice = choose(os.environ, settings)
    index = choice.index or "pip's default index"
    sys.stderr.write(f"torch: from {index} ({choice.reason})\n")
    sys.stdout.write(" ".join(filter(None, [*settings.extra_index_urls, choice.index])) + "\n")


if __name__ == "__main__":
    main()
