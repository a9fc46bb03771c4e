"""Names of GGUF files: parts of split files, block types, and files other than text models, as llama.cpp reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from millrace_shard.errors import WeightsError

SUFFIX = ".gguf"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(?!0{5})(\d{5})\.gguf", re.IGNORECASE)
"""The name of a part of a split file: its prefix, its number from 1, and how many there are."""
SNAPSHOT = re.compile(r"(.*/snapshots/([0-9a-f]{40}))/")
"""Begins the paths of files in the hub's cache: the folder of a commit, and the commit."""
MMPROJ_PART = "mmproj"
ASIDE = {
    MMPROJ_PART: "for images",
    "imatrix": "statistics for quantisation",
    "mtp-": "for drafts",
    "eagle3-": "for drafts",
    "dflash-": "for drafts",
    "dspark-": "for drafts",
}
"""Parts of the names of other files, and the purpose of these files."""


def reason_aside(name: str) -> str | None:
    """The purpose of a GGUF file other than a text model; None for a model."""
    base = PurePosixPath(name).name
    return next((reason for part, reason in ASIDE.items() if part in base), None)


def models(names: Iterable[str]) -> list[str]:
    """The models among `names`, sorted; a split file counts once, by the first part that is there."""
    first: dict[str, str] = {}
    for name in sorted(names):
        if name.endswith(SUFFIX) and reason_aside(name) is None:
            split = SPLIT.fullmatch(name)
            first.setdefault(f"{split[1]} of {split[3]}" if split else name, name)
    return list(first.values())


TAG = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)
"""The block type in the name of a file, without its number and suffix."""
PREFERRED = ("Q4_K_M", "Q8_0")


def chosen(names: Iterable[str], tag: str | None) -> str | None:
    """The model of a repository with these files, by the rule of llama.cpp's `-hf`; None if there is none.

    It is the first one by name that contains `tag`, without regard to case, before a dot or hyphen. Without a tag it is
    one with the first of PREFERRED that there is, else the first one.
    """
    there = models(names)
    for wanted in PREFERRED if tag is None else (tag,):
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        for name in there:
            if pattern.search(name):
                return name
    return there[0] if tag is None and there else None


def _bits(name: str) -> int:
    """The first number in the block type that a name ends with: 4 for Q4_K_M; 0 without one."""
    split = SPLIT.fullmatch(name)
    tag = TAG.search(split[1] if split else name.removesuffix(SUFFIX))
    digits = re.search(r"\d+", tag[1]) if tag else None
    return int(digits[0]) if digits else 0


def best_mmproj(names: Iterable[str], model: str) -> str | None:
    """The file with the encoder of images for `model`, by the rule of llama.cpp's `-hf`; None if there is none.

    `names` and `model` are paths in one repository. Of the files in folders that lead to the model, it is the one in
    the deepest, then the one whose number of bits is nearest to the model's, then the first by name.
    """
    path, bits = PurePosixPath(model), _bits(model)
    files = (PurePosixPath(name) for name in names)
    inside = [
        file
        for file in files
        if MMPROJ_PART in file.name and file.suffix == SUFFIX and file.parent in path.parents
    ]
    rank = {file: (-len(file.parts), abs(_bits(file.name) - bits), str(file)) for file in inside}
    return str(min(inside, key=rank.__getitem__)) if inside else None


def mmproj_beside(path: Path) -> Path | None:
    """The file with the encoder of images for the model in `path`, in its folder or repository, if any."""
    path = path.absolute()
    if reason_aside(path.name) is not None:
        return None
    snapshot = SNAPSHOT.match(str(path))
    root = Path(snapshot[1]) if snapshot else path.parent
    folders = (folder for folder in path.parents if folder.is_relative_to(root))
    files = (file for folder in folders for file in folder.glob(f"*{SUFFIX}"))
    names = (str(file.relative_to(root)) for file in files)
    name = best_mmproj(names, str(path.relative_to(root)))
    return None if name is None else root / name


def tags(names: Iterable[str]) -> list[str]:
    """The block types by which `chosen` finds the models among `names`; the name of a file that has none."""
    stems = (
        split[1] if (split := SPLIT.fullmatch(name)) else name.removesuffix(SUFFIX)
        for name in models(names)
    )
    found = (match[1].upper() if (match := TAG.search(stem)) else stem for stem in stems)
    return list(dict.fromkeys(found))


def lines_aside(names: Iterable[str]) -> list[str]:
    """A line for the log for each GGUF file that is not a text model."""
    files = sorted(name for name in names if name.endswith(SUFFIX))
    reasons = ((name, reason_aside(name)) for name in files)
    return [
        f"{name} is left aside: it is {reason}" for name, reason in reasons if reason is not None
    ]


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that has the file `name`; only `name` for a file that is not split."""
    split = SPLIT.fullmatch(name)
    if split is None:
        return [name]
    return [
        f"{split[1]}-{number:05d}-of-{split[3]}{SUFFIX}" for number in range(1, int(split[3]) + 1)
    ]


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of the model that has the part `path`, in their order. Raises WeightsError, naming those that lack."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    if len(parts) == 1:
        return (path,)
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise WeightsError(
            f"the split file {path} is incomplete: {in_short(missing)} of its {len(parts)} parts"
            f" {'is' if len(missing) == 1 else 'are'} missing from {path.parent}"
        )
    return tuple(parts)


MOST_NAMED = 5


def in_short(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
