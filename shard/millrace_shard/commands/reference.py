"""`reference`: what plain `transformers` generates, greedily and in float32, for others to be compared with.

Reads JSON lines `{"input_ids": [int, …], "max_new_tokens": int}` from stdin and answers each with a JSON line of three
columns, one value for each new token: `ids`, `logprobs` (natural logarithm, float32, of the untouched logits) and
`runners_up`, the id and the log probability of the second-best token. Generation is `transformers`' own, over its
eager attention; nothing of our decoders, kernels or samplers takes part, and no end-of-sequence token ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from millrace_shard.errors import ModelError, WeightsError
from millrace_shard.models.description import read_any_config
from millrace_shard.variables import Variables
from millrace_shard.weights.gguf.known_folders import MODEL, model_files
from millrace_shard.weights.hub import OFF, HubSettings, resolve
from millrace_shard.weights.safetensor_files import SafetensorFiles


class QuestionError(ModelError):
    """A line of stdin is not a question."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the number of tokens to generate."""

    input_ids: tuple[int, ...]
    max_new_tokens: int

    @classmethod
    def parse(cls, line: str, vocab_size: int) -> Question:
        """Read one line of stdin; raises QuestionError."""
        try:
            fields = json.loads(line)
            ids, count = fields["input_ids"], fields["max_new_tokens"]
        except (ValueError, TypeError, LookupError):
            raise QuestionError(
                f"not a question: {line[:80]!r}; input_ids and max_new_tokens are needed"
            ) from None
        if not isinstance(ids, list) or not ids or not all(_is_count(id_) for id_ in ids):
            raise QuestionError("input_ids must be a list of one or more token ids")
        if max(ids) >= vocab_size:
            raise QuestionError(f"the model knows {vocab_size} tokens; given: {max(ids)}")
        if not _is_count(count) or count == 0:
            raise QuestionError(f"max_new_tokens must be a positive whole number, not {count!r}")
        return cls(tuple(ids), count)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer every line of stdin on stdout; returns 1, with `Error: …` on stderr, for a bad model or line."""
    parser = argparse.ArgumentParser(prog="millrace-shard reference", description=__doc__)
    parser.add_argument("model_id", help="a folder or a name on the hub")
    parser.add_argument("--revision", default=Variables().revision)
    arguments = parser.parse_args(argv)
    settings = HubSettings.of(Variables())
    try:
        folder = resolve(
            arguments.model_id, revision=arguments.revision, settings=settings, mmproj=OFF
        )
        model = load_reference(folder)
        for answer in answers(model, sys.stdin):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    except ModelError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    return 0


def load_reference(folder: Path) -> PreTrainedModel:
    """The checkpoint in `folder`, loaded by `transformers` in float32 on CPU. Raises ModelError."""
    config = read_any_config(folder)
    is_gguf = (folder / MODEL).is_file()
    if is_gguf and len(model_files(folder)) > 1:
        raise WeightsError(
            "transformers reads no split GGUF files; merge the parts with: llama-gguf-split --merge"
        )
    if not is_gguf:
        SafetensorFiles(folder).close()
    disable_progress_bar()
    set_verbosity_error()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=not is_gguf,
            gguf_file=MODEL if is_gguf else None,
            local_files_only=True,
            trust_remote_code=False,
        )
    except ImportError as error:
        raise WeightsError(
            f"transformers reads a GGUF file with the package gguf: pip install gguf ({error})"
        ) from error
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise WeightsError(f"transformers cannot load {folder}: {error}") from error
    # The checkpoint's settings may enable sampling, penalties or stopping, so they are replaced.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.eval()


def answers(model: PreTrainedModel, lines: Iterable[str]) -> Iterator[dict[str, list[Any]]]:
    """One answer for each line that is not blank, in order. Raises QuestionError."""
    for line in lines:
        if line.strip():
            yield generate(model, Question.parse(line, int(model.config.vocab_size)))


@torch.inference_mode()
def generate(model: PreTrainedModel, question: Question) -> dict[str, list[Any]]:
    prompt = torch.tensor([question.input_ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=question.max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs = torch.cat(output.logits).float().log_softmax(-1)
    ids = output.sequences[0, prompt.shape[1] :]
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1)
    others = logprobs.scatter(1, ids[:, None], -torch.inf).max(-1)
    return {
        "ids": ids.tolist(),
        "logprobs": chosen.tolist(),
        "runners_up": list(zip(others.indices.tolist(), others.values.tolist(), strict=True)),
    }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
