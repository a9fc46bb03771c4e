"""The ways in which a request is continued: how its tokens are chosen, and what is told beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace_launcher.verify.requests.question import COMPLETIONS, GENERATE

LETTERS: Mapping[str, Any] = {"type": "regex", "value": "[QZ]{1000}"}
"""Leaves a handful of tokens at each place, so that whatever the model, guesses are right now and then."""
CHAINS: Mapping[str, Any] = {"type": "regex", "value": "([QZ]%){500}"}
"""Forces every other token, as the only one that is left."""
BIASES = (4.0, -4.0, 2.5, -100.0)
COUNTS_OF_CANDIDATES = ("top_n_tokens", "logprobs")


@dataclass(frozen=True, slots=True)
class Kind:
    """Parameters of a route, but for what differs from request to request."""

    parameters: Mapping[str, Any]
    route: str = GENERATE
    biases: tuple[float, ...] = ()
    """Added to the scores of the prompt's last tokens, which a text is likely to take up."""

    def parameters_for(
        self, input_ids: Sequence[int], *, ignore_eos: bool, max_top_n_tokens: int
    ) -> dict[str, Any]:
        """For one prompt; `ignore_eos` holds unless a grammar says what ends."""
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
    # All but uniform over what the grammar leaves: right and wrong guesses are both certain to come.
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
            # Without candidates, as `decoder_input_details` has them.
            "logprobs": 0,
        },
        COMPLETIONS,
    ),
)


def kinds_for(*, grammars: bool) -> list[Kind]:
    """What a server can be asked for, which takes grammars or does not."""
    return [kind for kind in KINDS if grammars or "grammar" not in kind.parameters]
