"""Images of messages as `data:` URLs, which every server of OpenAI's API takes."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_SIGNS = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
)
_URLS = ("data:", "https:", "http:")


class Picture(Protocol):
    """A `PIL.Image.Image`."""

    def save(self, file: io.BytesIO, kind: str) -> None:
        """Write it as a file of this kind."""


Image = str | os.PathLike[str] | bytes | Picture


def image_url(image: Image) -> str:
    """Return an image as a `data:` URL: a path, the bytes of a file, or an image of Pillow; URLs stay as they are.

    Raises:
        OSError: a file cannot be read.
        TypeError: it is none of these.

    """
    if isinstance(image, str) and image.lower().startswith(_URLS):
        return image
    if isinstance(image, (str, os.PathLike)):
        content = Path(image).read_bytes()
    elif isinstance(image, bytes):
        content = image
    elif hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, "PNG")
        content = file.getvalue()
    else:
        raise TypeError(
            f"an image must be a path, bytes or an image of Pillow, not {type(image).__name__}"
        )
    return f"data:{_media_type(content)};base64,{base64.b64encode(content).decode()}"


def image_part(image: Image) -> dict[str, Any]:
    """Return the part of a message's content for an image; raises as `image_url`."""
    return {"type": "image_url", "image_url": {"url": image_url(image)}}


def with_image_urls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Replace parts of the type `image`, as transformers' chats have them, by OpenAI's parts.

    Such a part has the image as `image`, `path` or `url`. Raises as `image_url`, and ValueError for a part with none.
    """
    return [
        {**message, "content": [_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), (list, tuple))
        else message
        for message in messages
    ]


def _part(part: object) -> object:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    images = [part[name] for name in ("image", "path", "url") if part.get(name) is not None]
    if len(images) != 1:
        raise ValueError("a part of the type `image` must have one of `image`, `path` and `url`")
    return image_part(images[0])


def _media_type(content: bytes) -> str:
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    kind = next((kind for sign, kind in _SIGNS if content.startswith(sign)), None)
    return "application/octet-stream" if kind is None else f"image/{kind}"
