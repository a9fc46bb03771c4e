"""Certificates as an operator would make them, in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Certificate:
    """One party's files: its certificate and key, and the authority it trusts."""

    cert: Path
    key: Path
    ca: Path


def certificate(
    folder: Path,
    name: str,
    *names: str,
    authority: trustme.CA | None = None,
    trusts: trustme.CA | None = None,
) -> Certificate:
    """A certificate for `names`, signed by `authority` or by a new one; it trusts the same authority."""
    authority = authority or trustme.CA()
    issued = authority.issue_cert(*names or ("localhost",))
    files = Certificate(*(folder / f"{name}-{part}.pem" for part in ("cert", "key", "ca")))
    files.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.key.write_bytes(issued.private_key_pem.bytes())
    (trusts or authority).cert_pem.write_to_path(str(files.ca))
    return files
