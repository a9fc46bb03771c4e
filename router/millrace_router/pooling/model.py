"""What a model yields: by its files, those that sentence-transformers adds among them, and the flag `--task`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from millrace_proto.small_files import read_small_file
from millrace_router.pooling.prompts import ScoreTemplate
from millrace_router.request.request import Pooling, Task
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_router.text.tokenizer import Tokenizer

PLAIN_KINDS = frozenset({"Transformer", "Pooling", "Normalize", "LogitScore"})
"""Modules that are computed here."""
LAST_TOKEN = "lasttoken"  # noqa: S105
PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScore:
    """Tokens whose logits make a score: the first minus the second, or only the first."""

    true_token_id: int
    false_token_id: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of both, or of the one."""
        false = self.false_token_id
        return (self.true_token_id,) if false is None else (self.true_token_id, false)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceTransformersFiles:
    """What the files of sentence-transformers define; empty without them."""

    is_embedding: bool = False
    """Whether the modules make an embedding."""
    normalizes: bool = True
    score: LogitScore | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None

    @property
    def default_prompt(self) -> str:
        """The prompt of texts whose request names none."""
        return "" if self.default_prompt_name is None else self.prompts[self.default_prompt_name]


def read_files(folder: Path) -> SentenceTransformersFiles:
    """Read the files in `folder`; raises ModelFilesError for modules that are not supported."""
    settings = _object(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or any(not isinstance(one, str) for one in prompts.values()):
        raise ModelFilesError(
            "`prompts` of config_sentence_transformers.json must be texts by name"
        )
    if default is not None and default not in prompts:
        raise ModelFilesError(f"config_sentence_transformers.json lacks the prompt {default!r}")
    modules = _modules(folder)
    score = None
    if "LogitScore" in modules:
        score = _logit_score(_object(modules["LogitScore"] / "config.json"))
    elif "Pooling" in modules:
        _check_pooling(_object(modules["Pooling"] / "config.json"))
    return SentenceTransformersFiles(
        is_embedding="Pooling" in modules,
        normalizes="Normalize" in modules or "Pooling" not in modules,
        score=score,
        prompts=prompts,
        default_prompt_name=default,
    )


def _modules(folder: Path) -> dict[str, Path]:
    """Return the folder of each module by the name of its class; raises ModelFilesError."""
    listed = _read(folder / "modules.json")
    if listed is None:
        return {}
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ModelFilesError("modules.json must be a list of modules")
    folders: dict[str, Path] = {}
    for module in listed:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in PLAIN_KINDS:
            raise ModelFilesError(f"modules.json has a module {kind}, which is not supported")
        path = module.get("path", "")
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelFilesError(f"modules.json has a path {path!r} outside the model")
        folders[kind] = folder / path
    return folders


def _check_pooling(settings: Mapping[str, Any]) -> None:
    """Raise ModelFilesError unless the embedding is the last token's state."""
    modes = settings.get("pooling_mode")
    if modes is None:
        marked = {
            name.removeprefix(PREFIX).removesuffix("_tokens").removesuffix("_token")
            for name, is_on in settings.items()
            if name.startswith(PREFIX) and is_on
        }
        modes = sorted(marked) or ["mean"]
    if isinstance(modes, str):
        modes = [modes]
    if modes != [LAST_TOKEN]:
        method = "+".join(map(str, modes)) if isinstance(modes, list) else modes
        raise ModelFilesError(
            f"the embedding is pooled by {method}, which is not supported, only {LAST_TOKEN} is"
        )


def _logit_score(settings: Mapping[str, Any]) -> LogitScore:
    true, false = settings.get("true_token_id"), settings.get("false_token_id")
    if not isinstance(true, int) or not isinstance(false, int | None):
        raise ModelFilesError("the config of LogitScore must name the ids of its tokens")
    return LogitScore(true_token_id=true, false_token_id=false)


def _object(path: Path) -> dict[str, Any]:
    value = _read(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object")
    return value


def _read(path: Path) -> Any:  # noqa: ANN401
    """Return the JSON of a file, None if there is none; raises ModelFilesError."""
    try:
        return orjson.loads(read_small_file(path))
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error


AUTO = "auto"
YES, NO = "yes", "no"
"""The answers of Qwen3-Reranker, each one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel:
    """The tasks of the server, and how embeddings and scores are made."""

    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    files: SentenceTransformersFiles = field(default_factory=SentenceTransformersFiles)
    score: LogitScore | None = None
    """Set with the task SCORE."""
    template: ScoreTemplate | None = None
    """Set with the task SCORE."""

    @property
    def score_pooling(self) -> Pooling:
        """What the prompts of scores yield; the server must have this task."""
        assert self.score is not None
        return Pooling(self.score.ids)


GENERATES = PoolingModel()


def pooling_of(
    requested: Collection[str],
    folder: Path,
    model: ModelFiles,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> PoolingModel:
    """Return the tasks of the flag, `requested`, or the ones that the files name; raises ModelFilesError."""
    architectures = model.config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if str(name).endswith("ForSequenceClassification"):
            raise ModelFilesError(
                f"{name} is not supported: scores are the logits of two tokens of a causal model"
            )
    wants = frozenset(requested) - {AUTO}
    if wants == {Task.GENERATE}:
        return GENERATES
    files = read_files(folder)
    tasks = frozenset(map(Task, wants)) or frozenset({_task_of(files, architectures)})
    if Task.SCORE not in tasks:
        return PoolingModel(tasks=tasks, files=files)
    return PoolingModel(
        tasks=tasks,
        files=files,
        score=files.score or _yes_or_no(tokenizer),
        template=ScoreTemplate.of(template),
    )


def _task_of(files: SentenceTransformersFiles, architectures: object) -> Task:
    """Return the task of a model that no flag names."""
    if files.score is not None:
        return Task.SCORE
    is_headless = (isinstance(architectures, list) and bool(architectures)) and not any(
        "For" in str(name) or "LMHead" in str(name) for name in architectures
    )
    return Task.EMBED if files.is_embedding or is_headless else Task.GENERATE


def _yes_or_no(tokenizer: Tokenizer) -> LogitScore:
    true, false = tokenizer.id_of(YES), tokenizer.id_of(NO)
    if true is None or false is None:
        raise ModelFilesError(f"--task score needs a tokenizer with the tokens {YES!r} and {NO!r}")
    return LogitScore(true_token_id=true, false_token_id=false)
