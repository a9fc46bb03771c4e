"""One HTML document from its sources, and the policy that forbids a browser all other scripts."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z/]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z/]+\.js)"></script>')
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass(frozen=True, slots=True)
class Document:
    """A page, ready to send."""

    body: bytes
    policy: str
    """`Content-Security-Policy`, which allows these scripts and styles, and requests to this server."""

    @property
    def digest(self) -> str:
        """Hash of the body."""
        return sha256(self.body).hexdigest()[:32]


def load(name: str, root_path: str = "") -> Document:
    """Read `<name>/<name>.html` from this folder, and put its styles and scripts into it.

    `root_path`, where a proxy has the server, is told to the scripts: a page cannot tell it from an address such as
    `/llm` that lacks the last slash.
    """
    source = _read(f"{name}/{name}.html")
    if root_path:
        source = source.replace("<html ", f'<html data-root="{root_path}/" ', 1)
    styles = [_read(file) for file in _STYLE.findall(source)]
    scripts = [_read(file) for file in _SCRIPT.findall(source)]
    hashes = {"style-src": _hashes(styles), "script-src": _hashes(scripts)}
    source = _STYLE.sub(lambda found: f"<style>{_read(found[1])}</style>", source)
    source = _SCRIPT.sub(lambda found: f"<script>{_read(found[1])}</script>", source)
    allowed = "; ".join(f"{directive} {values}" for directive, values in hashes.items())
    return Document(source.encode(), f"{_POLICY}; {allowed}")


def _read(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = (b64encode(sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
