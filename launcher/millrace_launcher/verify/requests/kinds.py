"""Kinds of requests: how tokens are chosen, and which details the answer has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace_launcher.verify.requests.question import COMPLETIONS, GENERATE

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
