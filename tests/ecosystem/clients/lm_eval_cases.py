"""lm-eval over `/v1/completions`: what it finds is what its own `hf` backend finds in the same checkpoint.

The server has to compute in float32.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

# Before anything of Hugging Face's is imported.
os.environ |= {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("HF_HOME", tempfile.mkdtemp())

from cases import run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent
MODEL = HERE.parent.parent.parent / "demo" / "model"
LOCAL = {"tokenizer": str(MODEL), "tokenizer_backend": "huggingface"}
CHOICE, WORDS, STORY = TASKS = ("demo_choice", "demo_words", "demo_story")
CHANCE = 0.5
TOLERANCE = 2e-3
"""How far sums of log probabilities may be apart, in a text of a few words."""

logging.disable(logging.WARNING)


def evaluate(backend: str, tasks: tuple[str, ...], **arguments: Any) -> dict[str, Any]:
    """All results and samples."""
    found = simple_evaluate(
        model=backend,
        model_args=arguments,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(HERE / "lm_eval_tasks"), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        verbosity="ERROR",
    )
    assert found is not None
    return found


@functools.cache
def expected() -> dict[str, Any]:
    """The results of the checkpoint in transformers."""
    arguments = {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu"}
    # The API's backends put nothing before a text.
    return evaluate("hf", TASKS, batch_size=4, add_bos_token=False, max_length=1024, **arguments)


def served(base_url: str, tasks: tuple[str, ...], **arguments: Any) -> dict[str, Any]:
    """The same, asked of the server."""
    return evaluate(
        "local-completions",
        tasks,
        model="served",
        base_url=f"{base_url}/v1/completions",
        max_length=1024,
        **arguments,
    )


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """The result of each document, in the order of documents."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def check_choices(found: dict[str, Any]) -> None:
    """Log probabilities of all choices, which of them are greedy, and what the task makes of them."""
    for theirs, ours in zip(responses(expected(), CHOICE), responses(found, CHOICE), strict=True):
        for (score, is_greedy), (own_score, own_is_greedy) in zip(theirs, ours, strict=True):
            assert abs(float(score) - float(own_score)) < TOLERANCE, (score, own_score)
            assert str(is_greedy) == str(own_is_greedy), (score, own_score)
    assert found["results"][CHOICE] == expected()["results"][CHOICE]


def choices_of_token_ids_score_as_they_do_there(base_url: str) -> None:
    found = served(base_url, (CHOICE,), batch_size=4, **LOCAL)
    check_choices(found)
    assert found["results"][CHOICE]["acc,none"] > CHANCE, "what the demo model knows"


def choices_score_as_they_do_there_with_the_servers_tokenizer(base_url: str) -> None:
    check_choices(served(base_url, (CHOICE,), num_concurrent=3))


def long_texts_are_as_likely_as_they_are_there(base_url: str) -> None:
    found = served(base_url, (STORY,), **LOCAL)
    for (theirs,), (ours,) in zip(
        responses(expected(), STORY), responses(found, STORY), strict=True
    ):
        assert abs(float(theirs) - float(ours)) < 1e-5 * abs(float(theirs)) + TOLERANCE


def answers_are_what_they_are_there(base_url: str) -> None:
    found = served(base_url, (WORDS,), tokenizer_backend="remote")
    assert responses(found, WORDS) == responses(expected(), WORDS)
    assert found["results"][WORDS] == expected()["results"][WORDS]


if __name__ == "__main__":
    run(globals())
