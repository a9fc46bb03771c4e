"""Plain words for what pydantic finds: its own texts never reach a client."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError as ShapeError

from millrace_router.api.anthropic.request import MessagesRequest
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.api.tgi.request import CompatGenerateRequest
from millrace_router.validation.shape_messages import shape_error

USER = {"role": "user", "content": "a"}
MODELS: dict[Any, dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "a"},
    CompatGenerateRequest: {"inputs": "a"},
    MessagesRequest: {"messages": [USER], "max_tokens": 5, "model": "x"},
    ResponsesRequest: {"input": "a"},
}
WRONG: tuple[Any, ...] = (None, True, -(10**30), 1.5, 1e300, "x", "", [], [[]], [{}], {}, {"a": 1})
PYDANTICS = ("Input should", "Input tag", "Field required", "Value error", "a valid ", "Extra in")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_words_of_pydantic(model: Any) -> None:
    whole = MODELS[model]
    errors = 0
    for name in model.model_fields:
        for value in WRONG:
            body = whole | {name: value}
            try:
                model.model_validate(body)
            except ShapeError as caught:
                errors += 1
                message = shape_error(caught, body).client_text
                assert not any(word in message for word in PYDANTICS), message
                assert name in message or message.startswith("The body ")
    assert errors > 20


def test_alternatives_are_not_part_of_a_path() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    with pytest.raises(ShapeError) as caught:
        ChatCompletionRequest.model_validate(body)
    assert (
        shape_error(caught.value, body).client_text == "`messages[0].content[0].text` is required"
    )
