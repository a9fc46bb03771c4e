"""What a model yields, by its files and the flag `--task`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from millrace_router.pooling.score_template import ScoreTemplate
from millrace_router.pooling.sentence_transformers import (
    LogitScore,
    SentenceTransformersFiles,
    read_files,
)
from millrace_router.request.request import Pooling, Task
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_router.text.tokenizer import Tokenizer

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
    asked: Collection[str],
    folder: Path,
    model: ModelFiles,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> PoolingModel:
    """Return the tasks that the flag has `asked` for, or those that the files name; raises ModelFilesError."""
    architectures = model.config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if str(name).endswith("ForSequenceClassification"):
            raise ModelFilesError(
                f"{name} is not supported: scores are the logits of two tokens of a causal model"
            )
    wants = frozenset(asked) - {AUTO}
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
