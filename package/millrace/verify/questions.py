"""The requests of the cases: prompts, kinds of parameters, and both together with known tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SHARED = (
    "You are a careful assistant. ExactAnswer in plain words, say what you do not know, and never invent a source. "
    "The conversation below is between a reader of a technical manual and you. "
)
LONG = (
    "A server that generates text keeps the keys and values of every token it has seen, since each new token attends "
    "to all of them. They lie in blocks of a fixed size, so that memory is given out as answers grow, and prompts that "
    "begin alike share what was computed once. "
)
PROMPTS = (
    "1, 2, 3, 5, 8, 13, 21, 34, 1, 2, 3, 5, 8, 13, 21, 34, 1, 2, 3, 5,",
    LONG * 12 + "In one sentence, this means",
    SHARED + "What does a scheduler do when memory runs out?",
    "a",
    SHARED + "Why is a long prompt computed in pieces?",
    "Größe, œuvre, 你好，世界, Привет, 😀👩‍💻 and naïve café:",  # noqa: RUF001
    LONG * 3 + "To sum up,",
    SHARED + SHARED + "Name one thing that makes an answer slower.",
    "What is continuous batching?",
    "def step(batch):\n    for row in batch:\n        row.tokens.append(",
    LONG + "The keys and values of every token",
    "The the the the the the the",
)
UNRELATED = (
    "Once upon a time in a quiet harbour",
    "Complete the list: iron, copper, tin,",
    LONG * 5,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "?",
    SHARED * 2 + "Tell me about something else.",
)


class PromptsError(Exception):
    """The prompt file cannot be read or contains no prompts."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read the prompts of a text file, one a line without blank lines. Raises PromptsError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise PromptsError(f"{path} cannot be read: {error}") from error
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise PromptsError(f"{path} holds no prompt; write one a line")
    return prompts


GENERATE = "/generate_stream"
COMPLETIONS = "/v1/completions"
"""Supports logit biases and prompt log probabilities, which TGI's streams do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, whose last `truncate` tokens are `input_ids`; `parameters` are the route's."""

    text: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    parameters: Mapping[str, Any]
    route: str = GENERATE
    adapter: str | None = None
    """The name of a LoRA adapter; the base model if None."""

    @property
    def is_greedy(self) -> bool:
        """Whether the answer takes the likeliest token, possibly after penalties."""
        if self.route == COMPLETIONS:
            return bool(self.parameters["temperature"] == 0)
        return not self.parameters.get("do_sample", False)

    @property
    def num_tokens(self) -> int:
        """KV positions that it may need."""
        return len(self.input_ids) + self.max_new_tokens

    @property
    def body(self) -> dict[str, Any]:
        """The body of the HTTP request."""
        if self.route == COMPLETIONS:
            return {
                **self.parameters,
                **({} if self.adapter is None else {"model": self.adapter}),
                "prompt": self.input_ids,
                "max_tokens": self.max_new_tokens,
                "stream": True,
            }
        parameters = {
            **self.parameters,
            **({} if self.adapter is None else {"adapter_id": self.adapter}),
            "details": True,
            "max_new_tokens": self.max_new_tokens,
            "truncate": len(self.input_ids),
        }
        return {"inputs": self.text, "parameters": parameters}

    def seeded(self, seed: int) -> Question:
        return replace(self, parameters={**self.parameters, "seed": seed})


LETTERS: Mapping[str, Any] = {"type": "regex", "value": "[QZ]{1000}"}
"""Allows a few tokens at each position, so that draft tokens of any model are sometimes right."""
CHAINS: Mapping[str, Any] = {"type": "regex", "value": "([QZ]%){500}"}
"""Forces every other token."""
BIASES = (4.0, -4.0, 2.5, -100.0)
COUNTS_OF_CANDIDATES = ("top_n_tokens", "logprobs")


@dataclass(frozen=True, slots=True)
class Kind:
    """Parameters of a route, without those that differ between requests."""

    parameters: Mapping[str, Any]
    route: str = GENERATE
    biases: tuple[float, ...] = ()
    """Biases of the prompt's last tokens, which are likely in the answer."""

    def parameters_for(
        self, input_ids: Sequence[int], *, ignore_eos: bool, max_top_n_tokens: int
    ) -> dict[str, Any]:
        """The parameters for one prompt; `ignore_eos` is set unless there is a grammar."""
        found = {**self.parameters, "ignore_eos": ignore_eos and "grammar" not in self.parameters}
        for name in COUNTS_OF_CANDIDATES:
            if name in found:
                found[name] = min(found[name], max_top_n_tokens)
        if self.biases:
            last = input_ids[-len(self.biases) :]
            found["logit_bias"] = {
                str(id_): bias for id_, bias in zip(last, self.biases, strict=False)
            }
        return found


KINDS = (
    Kind({}),
    # Almost uniform over the allowed tokens, so that draft tokens are both accepted and rejected.
    Kind({"do_sample": True, "temperature": 1000.0, "grammar": LETTERS}),
    Kind({"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_n_tokens": 5}),
    Kind({"repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_n_tokens": 2}),
    Kind(
        {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1, "echo": True, "logprobs": 3},
        COMPLETIONS,
        BIASES,
    ),
    Kind({"do_sample": True, "temperature": 1.2, "typical_p": 0.9}),
    Kind({"grammar": LETTERS, "top_n_tokens": 3}),
    Kind({"grammar": CHAINS}),
    Kind({"do_sample": True, "min_p": 0.02, "watermark": True}),
    Kind(
        {
            "temperature": 0.0,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "echo": True,
            # No candidates, as with `decoder_input_details`.
            "logprobs": 0,
        },
        COMPLETIONS,
    ),
)


def kinds_for(*, grammars: bool) -> list[Kind]:
    """The kinds for a server with or without grammars."""
    return [kind for kind in KINDS if grammars or "grammar" not in kind.parameters]
