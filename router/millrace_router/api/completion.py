"""OpenAI's text completion request as a strict model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from millrace_router.api.openai import CommonRequest
from millrace_router.errors import SuffixNotSupported, ValidationError
from millrace_router.limits import Limits


class CompletionRequest(CommonRequest):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str]:
        """All prompts, in the order of the choices."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def num_samples(self) -> int:
        """Samples of each prompt, of which the best are its choices."""
        return max(self.num_choices, self.best_of or 0)

    def check(self, limits: Limits) -> None:
        """Check what only this route has; raises RouterError."""
        super().check(limits)
        if self.suffix:
            raise SuffixNotSupported
        if self.echo:
            raise ValidationError("`echo` is not supported")
        if self.logprobs is not None:
            raise ValidationError("`logprobs` is not supported on this endpoint")
        if self.best_of is not None:
            self._check_best_of(self.best_of, limits)

    def _check_best_of(self, best_of: int, limits: Limits) -> None:
        if best_of < self.num_choices:
            raise ValidationError(
                f"`best_of` must be >= `n`. Given: {best_of} and {self.num_choices}"
            )
        if best_of == self.num_choices:
            return
        if best_of > limits.max_best_of:
            raise ValidationError(
                f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
            )
        if self.stream:
            raise ValidationError("`best_of` > `n` is not supported when streaming tokens")
        if self.temperature == 0:
            raise ValidationError("you must use sampling when `best_of` is > 1")
