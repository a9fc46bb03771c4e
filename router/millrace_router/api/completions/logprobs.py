"""Log probabilities of a text completion, in the shape of OpenAI's first completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from millrace_router.api.completions.echo import Echo
from millrace_router.api.completions.offsets import CompletionOffsets
from millrace_router.api.completions.protocol import CompletionLogprobsJson
from millrace_router.api.openai.choice import LEAST_LOGPROB, id_name
from millrace_router.request.events import PromptLogprobs, TokenEvent
from millrace_router.request.float32 import shortest
from millrace_router.text.tokenizer import Tokenizer


class CompletionLogprobs:
    """Renders tokens with `num_candidates` each; candidates that tie for the last place may be missing.

    A token is named by its text, or by its bytes if they are not whole characters. If several tokens have one name,
    the map has the likeliest.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_candidates: int, *, names_ids: bool = False
    ) -> None:
        """With `names_ids`, the name of a token is its id, as in `token_id:5`."""
        self._tokenizer = tokenizer
        self._name: Callable[[int], str] = id_name if names_ids else tokenizer.token_name
        self._num_candidates = num_candidates

    def offsets(self, start: int) -> CompletionOffsets:
        """Make the offsets of a choice whose generated text begins at `start`."""
        return CompletionOffsets(self._tokenizer, start)

    def prompt(self, prompt: PromptLogprobs, echo: Echo) -> CompletionLogprobsJson:
        """Render the columns of a whole prompt, whose first token has no log probability."""
        columns = no_logprobs()
        for index, (id_, start) in enumerate(zip(prompt.ids, echo.starts, strict=True)):
            columns["tokens"].append(self._name(id_))
            columns["text_offset"].append(start)
            if index == 0:
                columns["token_logprobs"].append(None)
                columns["top_logprobs"].append(None)
                continue
            logprob = prompt.logprobs[index]
            columns["token_logprobs"].append(_number(logprob))
            columns["top_logprobs"].append(self._map((id_, logprob), prompt.candidates(index)))
        return columns

    def token(self, event: TokenEvent, offset: int) -> CompletionLogprobsJson:
        """Render the columns of one generated token that begins at `offset`."""
        token = event.token
        top = ((candidate.id, candidate.logprob) for candidate in event.top_tokens)
        return {
            "tokens": [self._name(token.id)],
            "token_logprobs": [_number(token.logprob)],
            "top_logprobs": [self._map((token.id, token.logprob), top)],
            "text_offset": [offset],
        }

    def _map(
        self, token: tuple[int, float], candidates: Iterable[tuple[int, float]]
    ) -> dict[str, float]:
        named: dict[str, float] = {}
        for id_, logprob in self._with(token, candidates):
            named.setdefault(self._name(id_), _number(logprob))
        return named

    def _with(
        self, token: tuple[int, float], candidates: Iterable[tuple[int, float]]
    ) -> Iterator[tuple[int, float]]:
        yield from islice(candidates, self._num_candidates)
        yield token


def no_logprobs() -> CompletionLogprobsJson:
    """Make empty columns."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join(parts: Iterable[CompletionLogprobsJson]) -> CompletionLogprobsJson:
    """Concatenate columns."""
    columns = no_logprobs()
    for part in parts:
        columns["tokens"] += part["tokens"]
        columns["token_logprobs"] += part["token_logprobs"]
        columns["top_logprobs"] += part["top_logprobs"]
        columns["text_offset"] += part["text_offset"]
    return columns


def _number(logprob: float) -> float:
    number = shortest(logprob)
    return LEAST_LOGPROB if number is None else number
