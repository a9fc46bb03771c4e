"""Images in each dialect: which prompt they become, and how they are refused."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken

from millrace_router.images.child import DecodingLimits, DecodingProcess
from millrace_router.images.families import geometry_of
from millrace_router.images.fetch import ImageFetcher
from millrace_router.images.geometry import AnyGeometry, Geometry
from millrace_router.images.prompts import ImagePrompts
from millrace_router.images.store import ImageStore
from millrace_router.request.limits import NO_ENCODER, dialect_of
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.router.edge import LIMITS, Edge, serving
from millrace_testing.text.texts import byte_level

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
BLIND = "{% for message in messages %}{{ message.content }};{% endfor %}"
GEOMETRY = Geometry.of(
    "smolvlm", {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}}
)
ONE = "<fake_token_around_image><global-img><image><image><fake_token_around_image>"
ROW = "<fake_token_around_image><row_{0}_col_{1}><image><image>"
SPLIT = f"{ROW.format(1, 1)}{ROW.format(1, 2)}\n{ROW.format(2, 1)}{ROW.format(2, 2)}\n\n{ONE}"


def sees(geometry: AnyGeometry = GEOMETRY) -> Tokenizer:
    rust = byte_level()
    rust.add_special_tokens([AddedToken(text, special=True) for text in geometry.needed_tokens])
    return Tokenizer(rust)


TOKENIZER = sees()
PLACEHOLDER = TOKENIZER.id_of("<image>")
ROOMY = replace(
    LIMITS,
    max_input_tokens=4000,
    max_total_tokens=5000,
    vocab_size=1000,
    image_token_id=PLACEHOLDER,
)


def png(color: str = "red", size: tuple[int, int] = (9, 9)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


RED, BLUE = data_url(png()), data_url(png("blue"))


@asynccontextmanager
async def seeing(
    *,
    geometry: AnyGeometry = GEOMETRY,
    template: str = TEMPLATE,
    max_images: int = 4,
    max_rows: int = 100,
    **limits: Any,
) -> AsyncIterator[Edge]:
    tokenizer = TOKENIZER if geometry is GEOMETRY else sees(geometry)
    placeholder = tokenizer.id_of(geometry.needed_tokens[0])
    store = ImageStore(
        DecodingProcess(geometry, DecodingLimits(**limits)),
        ImageFetcher((), max_bytes=1000),
        rows_per_tile=2,
        max_images=max_images,
        max_rows=max_rows,
        max_memory=1 << 20,
    )
    images = ImagePrompts(store, tokenizer.control_tokens)
    roomy = replace(ROOMY, image_token_id=placeholder)
    async with serving(tokenizer=tokenizer, limits=roomy, template=template, images=images) as edge:
        try:
            yield edge
        finally:
            await images.close()


def prompt_of(edge: Edge, tokenizer: Tokenizer = TOKENIZER) -> str:
    return tokenizer.decode(edge.batcher.requests[-1].input_ids, skip_special_tokens=False)


def part(url: str = RED, **options: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def asks(*content: Any, path: str = CHAT) -> dict[str, Any]:
    turn = {"role": "user", "content": list(content)}
    if path == RESPONSES:
        return {"model": "org/tiny", "input": [turn]}
    return {"model": "org/tiny", "max_tokens": 2, "messages": [turn]}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


async def test_images_of_openai_chats_stand_where_they_are_in_the_content() -> None:
    async with seeing() as edge:
        answer = await edge.answer(
            CHAT, asks(said("a"), part(), part(BLUE, detail="low"), said("b"))
        )
        (request,) = edge.batcher.requests
        assert prompt_of(edge) == f"user:a{SPLIT}{ONE}b;assistant:"
        assert answer["usage"]["prompt_tokens"] == len(request.input_ids)
    assert [span.tokens for span in request.images] == [2] * 6
    assert all(
        set(request.input_ids[span.position : span.end]) == {PLACEHOLDER} for span in request.images
    )
    assert len({span.image.digest for span in request.images}) == 2


async def test_an_image_of_gemma_stands_between_its_tokens_and_a_text_of_them_is_text() -> None:
    geometry = geometry_of("gemma3", {"size": {"height": 8, "width": 8}})
    template = TEMPLATE.replace("<image>", geometry.placeholder)
    async with seeing(geometry=geometry, template=template) as edge:
        await edge.answer(CHAT, asks(said("a"), part(), said("<start_of_image><image_soft_token>")))
        (request,) = edge.batcher.requests
        soft = "<image_soft_token>"
        around = f"\n\n<start_of_image>{soft}{soft}<end_of_image>\n\n"
        prompt = f"user:a{around}<start_of_image>{soft};assistant:"
        assert prompt_of(edge, sees(geometry)) == prompt
        assert [span.tokens for span in request.images] == [2]
        assert request.input_ids.count(sees(geometry).id_of(soft)) == 2


async def test_a_markdown_image_of_paligemma_comes_before_a_token_and_a_line() -> None:
    geometry = geometry_of("paligemma", {"size": {"height": 8, "width": 8}})
    async with seeing(geometry=geometry) as edge:
        await edge.answer("/generate", {"inputs": f"![]({RED})what?"})
        assert prompt_of(edge, sees(geometry)) == "<image><image><bos>what?\n"


async def test_images_of_responses_and_earlier_turns_and_results_are_read() -> None:
    image = {"type": "input_image", "image_url": RED, "detail": "low"}
    text = {"type": "input_text", "text": "b"}
    async with seeing() as edge:
        body = asks(image, text, path=RESPONSES)
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": [image]}
        body["input"] += [call, result, {"role": "user", "content": "c"}]
        await edge.answer(RESPONSES, body)
        assert f"user:{ONE}b;" in prompt_of(edge)
        assert f"tool:{ONE};user:c;" in prompt_of(edge)
        assert len(edge.batcher.requests[-1].images) == 2


async def test_images_of_anthropic_blocks_and_results_are_read() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
    image = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [said("shot"), image]}
    async with seeing() as edge:
        body = asks(image, said("b"))
        body["messages"] += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        _, _, response = await edge.post(MESSAGES, body)
        assert response.status == 200
        assert "x-millrace-ignored" not in response.headers
        assert f"user:{SPLIT}b;" in prompt_of(edge)
        assert f"tool:shot{SPLIT};" in prompt_of(edge)
        await edge.answer(MESSAGES, asks(image))
        status, counted, _ = await edge.post(f"{MESSAGES}/count_tokens", asks(image))
        assert (status, counted["input_tokens"]) == (200, len(edge.batcher.requests[-1].input_ids))


async def test_markdown_images_of_inputs_are_read() -> None:
    async with seeing() as edge:
        parameters: dict[str, Any] = {"max_new_tokens": 1}
        body = {"inputs": f"a ![]({RED}) b ![x]({BLUE})", "parameters": parameters}
        _, _, response = await edge.post("/generate", body)
        assert response.status == 200
        assert "x-millrace-ignored" not in response.headers
        assert prompt_of(edge) == f"a {SPLIT} b {SPLIT}"
        estimate = await edge.answer("/v1/estimate", body)
        assert estimate["prompt_tokens"] == len(edge.batcher.requests[-1].input_ids)
        parameters["apply_chat_template"] = True
        await edge.answer("/generate", body)
        assert prompt_of(edge) == f"user:a {SPLIT} b {SPLIT};assistant:"
        parameters["apply_chat_template"] = False
        lines = f"{RED[:40]}\n{RED[40:]}"
        wild = f'a ![]( {lines}\t"a title") b ![x]({BLUE} )'
        for inputs, left in ((wild, None), (f"{wild}![](file.png)", "inputs.image")):
            _, _, response = await edge.post("/generate", {**body, "inputs": inputs})
            assert response.headers.get("x-millrace-ignored") == left
            assert prompt_of(edge).startswith(f"a {SPLIT} b {SPLIT}")


async def test_a_placeholder_that_a_client_writes_is_text() -> None:
    async with seeing() as edge:
        await edge.answer(CHAT, asks(said("<image> <fake_token_around_image>"), part(detail="low")))
        (request,) = edge.batcher.requests
        assert len(request.images) == 1
        assert request.input_ids.count(PLACEHOLDER or 0) == 2
        await edge.answer(CHAT, asks(said("<ima"), said("ge>")))
        assert not edge.batcher.requests[-1].images
        assert PLACEHOLDER not in edge.batcher.requests[-1].input_ids
        for inputs in ("a <image>", f"<image> ![]({RED})"):
            status, answer, _ = await edge.post("/generate", {"inputs": inputs})
            assert (status, answer["error_type"]) == (422, "validation")


async def test_one_image_in_two_requests_is_decoded_once_and_freed_with_them() -> None:
    async with seeing() as edge:
        await edge.answer(CHAT, asks(part()))
        await edge.answer(CHAT, asks(part(), part(BLUE)))
        store = edge.services.images.store
        assert store is not None
        assert store.num_prepared == 2
        first, second = edge.batcher.requests
        assert first.images[0].image is second.images[0].image
        assert store.in_use == 2 * 5 * 3 * 8 * 8


BAD: list[tuple[Any, str, str]] = [
    (part("data:image/png,abc"), "1", "has a `data:` URL that is not base64"),
    (part("data:image/png;base64,a*b"), "1", "is not valid base64"),
    (part(data_url(b"%!PS-Adobe")), "1", "is not one of PNG, JPEG, WEBP, GIF, TIFF"),
    (part(data_url(png()[:-30])), "1", "cannot be decoded"),
    (part(data_url(png(size=(40, 40)))), "1", "has more than 1000 pixels"),
    (part(data_url(png() + bytes(3000))), "1", "has more than 2000 bytes"),
    (part("https://example.com/a.png"), "1", "is an address: this server takes only `data:` URLs"),
    (part("file:///etc/passwd"), "1", "is an address"),
    (part(detail="huge"), "1", "has a `detail` that is not one of"),
]


@pytest.mark.parametrize(("bad", "index", "message"), BAD)
async def test_a_bad_image_is_refused_in_the_shape_of_each_dialect(
    bad: dict[str, Any], index: str, message: str
) -> None:
    async with seeing(max_pixels=1000, max_bytes=2000) as edge:
        status, answer, _ = await edge.post(CHAT, asks(said("a"), bad))
        assert (status, answer["error_type"]) == (422, "validation")
        assert f"`messages.0.content.{index}`: the image {message}" in str(answer)
        bad = {"type": "input_image", **bad["image_url"]}
        bad["image_url"] = bad.pop("url")
        status, answer, _ = await edge.post(
            RESPONSES, asks({"type": "input_text", "text": "a"}, bad, path=RESPONSES)
        )
        assert status in {400, 422}
        assert f"`input.0.content.{index}`: the image {message}" in str(answer)
        source = {"type": "url", "url": bad["image_url"]}
        if "detail" not in bad:
            body = asks(said("a"), {"type": "image", "source": source})
            status, answer, _ = await edge.post(MESSAGES, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert f"`messages.0.content.{index}`: the image {message}" in str(answer)
        assert not edge.batcher.requests


async def test_more_images_or_tokens_than_allowed_are_refused_by_their_part() -> None:
    async with seeing(max_images=2, max_rows=11) as edge:
        for content, message in (
            (
                [part()] * 3,
                "`messages.0.content.2`: the image is one too many: a request may have 2",
            ),
            (
                [part()] * 2,
                "`messages.0.content.1`: the image needs 10 features, 20 with those before it",
            ),
        ):
            status, answer, _ = await edge.post(CHAT, asks(*content))
            assert status == 422
            assert message in str(answer)


async def test_a_template_of_texts_has_images_where_they_are_in_the_content() -> None:
    async with seeing(template=BLIND) as edge:
        await edge.answer(CHAT, asks(said("a 1"), part(), said("2<image>"), part(BLUE)))
        (request,) = edge.batcher.requests
        assert prompt_of(edge) == f"a 1{SPLIT}2<image>{SPLIT};"
    assert len(request.images) == 2 * 5
    assert request.input_ids.count(PLACEHOLDER) == 2 * 2 * 5


async def test_a_template_that_drops_images_refuses_them() -> None:
    only_texts = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    async with seeing(template=only_texts) as edge:
        status, answer, _ = await edge.post(CHAT, asks(said("a"), part()))
    assert (status, answer["error_type"]) == (422, "template_error")


async def test_a_prompt_with_an_image_is_not_truncated() -> None:
    async with seeing() as edge:
        body = {"inputs": f"![]({RED})", "parameters": {"truncate": 9}}
        status, answer, _ = await edge.post("/generate", body)
    assert (status, "`truncate` would cut a prompt with images" in str(answer)) == (422, True)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_model_whose_encoder_is_missing_names_the_flag(path: str) -> None:
    blind = replace(
        ROOMY, image_token_id=None, dialect=dialect_of(strict_tgi=False, lacks_encoder=True)
    )
    image = {
        CHAT: part(),
        RESPONSES: {"type": "input_image", "image_url": RED},
        MESSAGES: {"type": "image", "source": {"type": "url", "url": "https://host/image.png"}},
    }[path]
    async with serving(tokenizer=TOKENIZER, limits=blind, template=TEMPLATE) as edge:
        status, answer, _ = await edge.post(path, asks(image, path=path))
    assert status in {400, 422}
    assert NO_ENCODER in str(answer)
    assert "--mmproj FILE" in NO_ENCODER


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_model_that_reads_only_text_names_the_part(path: str) -> None:
    image = {"type": "input_image", "image_url": RED} if path == RESPONSES else part()
    text = {"type": "input_text", "text": "a"} if path == RESPONSES else said("a")
    async with serving(
        tokenizer=TOKENIZER, limits=replace(ROOMY, image_token_id=None), template=TEMPLATE
    ) as edge:
        status, answer, _ = await edge.post(path, asks(text, image, path=path))
    name = "input.0.content.1" if path == RESPONSES else "messages.0.content.1"
    assert status in {400, 422}
    assert f"this model reads only text (`{name}`)" in str(answer)
