"""OpenAI's text completion request as a strict model."""

from __future__ import annotations

from dataclasses import replace

from millrace_router.api.body.fields import Place, Prompt, prompts_of
from millrace_router.api.openai.common_request import CommonRequest
from millrace_router.errors import SuffixNotSupported, ValidationError
from millrace_router.request.dialect import Dialect
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.limits import Limits


class CompletionRequest(CommonRequest):
    """Body of `/v1/completions`."""

    place = Place.COMPLETION

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    """Whether the answer begins with the prompt."""
    logprobs: int | None = None
    """Candidates beside the log probability of each token; with `echo` of the prompt's tokens, too."""
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """All prompts, in the order of the choices."""
        return prompts_of(self.prompt)

    @property
    def num_characters(self) -> int:
        """Characters of all prompts that are texts."""
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))

    @property
    def num_samples(self) -> int:
        """Samples of each prompt; the best of them are its choices."""
        return max(self.num_choices, self.best_of or 0)

    @property
    def only_scores(self) -> bool:
        """Whether the answer has the prompt's scores and no new tokens."""
        return self.max_tokens == 0

    def generation(self, dialect: Dialect) -> GenerationRequest:
        """Translate, without a prompt; a request that only scores its prompt samples one token, which is not shown."""
        request = replace(
            super().generation(dialect),
            top_n_tokens=self.logprobs,
            adds_special_tokens=self.add_special_tokens is not False,
        )
        if not dialect.has_tgi_errors:
            names = replace(request.names, prompt="prompt", top_n_tokens="logprobs")
            request = replace(request, names=names)
        if self.only_scores:
            request = replace(request, max_new_tokens=1, min_new_tokens=None)
        if self.echo and self.logprobs is not None:
            most = max(self.logprobs, request.prompt_top_n_tokens)
            request = replace(request, prompt_logprobs=True, prompt_top_n_tokens=most)
        return request

    def check(self, limits: Limits) -> None:
        """Check the fields that TGI ignores or lacks; raises RouterError."""
        super().check(limits)
        if self.suffix:
            raise SuffixNotSupported
        if self.logprobs is not None and not 0 <= self.logprobs <= limits.max_top_n_tokens:
            raise ValidationError(
                f"`logprobs` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {self.logprobs}"
            )
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ValidationError("`echo` and `truncate_prompt_tokens` exclude each other")
        if self.only_scores and not self.echo:
            raise ValidationError("`max_tokens` must be strictly positive without `echo`")
        highest = max((max(ids) for ids in self.prompts if isinstance(ids, tuple)), default=0)
        if highest >= limits.vocab_size:
            raise ValidationError(
                f"`prompt` contains token id {highest}, but the model knows only {limits.vocab_size}"
            )
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
