"""A prompt that need not be text."""

from __future__ import annotations

from typing import Self

from millrace_router.request.parameters import GenerateParameters, GenerateRequest


class PromptRequest(GenerateRequest):
    """What a text completion asks of one prompt; no body of any route."""

    input_ids: tuple[int, ...] | None = None
    """The prompt's tokens, where the client has made them of a text itself; `inputs` is not looked at then."""

    @classmethod
    def of(cls, prompt: str | tuple[int, ...], parameters: GenerateParameters) -> Self:
        """For either kind of prompt."""
        if isinstance(prompt, str):
            return cls(inputs=prompt, parameters=parameters)
        return cls(inputs="", input_ids=prompt, parameters=parameters)
