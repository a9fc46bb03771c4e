"""Pictures in prompts: the texts that stand for them, and where they are in a text with Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from millrace_router.errors import ImageInvalid, TemplateError, ValidationError
from millrace_router.images.store import ImageStore
from millrace_router.request.images import ImageSource, PreparedImage
from millrace_router.text.control_tokens import ControlTokens

_MARKDOWN = re.compile(
    r"!\[[^\[\]\n]{0,256}\]"
    # Parts that are matched once, so that no text takes long.
    r'\(\s*+(?P<url>data:[^()"]++|[^()\s"]++)\s*+(?:"[^"\n]*+"\s*+)?\)',
    re.IGNORECASE,
)
"""An image in a text for TGI, with an address of any kind and possibly a title; base64 may have several lines."""
_READ = ("data:", "https:", "http:")


class ImagePrompts:
    """Makes prompts with pictures; without a store the model reads only text."""

    def __init__(self, store: ImageStore | None, control_tokens: ControlTokens) -> None:
        """The placeholder is one of `control_tokens`, so that no client's text in a chat becomes one."""
        self.store = store
        self._control_tokens = control_tokens

    @property
    def is_empty(self) -> bool:
        """Whether there are no pictures here."""
        return self.store is None

    async def prepare(
        self, sources: Sequence[ImageSource], salt: Sequence[str] = ()
    ) -> tuple[PreparedImage, ...]:
        """Return the pictures of a request; raises as `ImageStore.prepare`."""
        if self.store is None:
            raise ImageInvalid(sources[0].part, "cannot be used: this model reads only text")
        return await self.store.prepare(sources, salt)

    def expanded(self, prompt: str, images: Sequence[PreparedImage]) -> str:
        """Return a rendered prompt with the placeholders of each picture; raises TemplateError."""
        if not images:
            return prompt
        assert self.store is not None
        texts = [self.store.expansion(image) for image in images]
        try:
            geometry = self.store.geometry
            return self._control_tokens.expanded(
                prompt, geometry.placeholder, texts, geometry.around
            )
        except ValueError as error:
            raise TemplateError(str(error)) from None

    def parts_of(self, text: str) -> tuple[list[dict[str, str]], list[ImageSource]]:
        """Split a text at its Markdown images: parts for a template, and the images in order.

        Raises:
            ValidationError: there are images, and the text has their placeholder as well.

        """
        if self.store is None:
            return [], []
        matches = [match for match in _MARKDOWN.finditer(text) if _is_read(match)]
        sources = [ImageSource(match["url"].strip(), "inputs") for match in matches]
        if not sources:
            return [], []
        parts: list[dict[str, str]] = []
        end = 0
        for match in matches:
            parts += [{"type": "text", "text": text[end : match.start()]}, {"type": "image"}]
            end = match.end()
        parts.append({"type": "text", "text": text[end:]})
        placeholder = self.store.geometry.placeholder
        if any(placeholder in part.get("text", "") for part in parts):
            raise ValidationError(f"`inputs` has images and {placeholder}, which stands for one")
        return parts, sources

    def leaves_images(self, text: str) -> bool:
        """Return whether a Markdown image of a text stays text."""
        return any(self.store is None or not _is_read(each) for each in _MARKDOWN.finditer(text))

    def joined(self, parts: Sequence[dict[str, Any]], images: Sequence[PreparedImage]) -> str:
        """Return the text of `parts` with the placeholders of their pictures."""
        assert self.store is not None
        texts = map(self._text_of, images)
        pieces = [next(texts) if part["type"] == "image" else part["text"] for part in parts]
        behind, end = self.store.geometry.framed
        last = max(index for index, part in enumerate(parts) if part["type"] == "image")
        pieces[last] += behind
        return "".join([*pieces, end])

    @property
    def adds_special_tokens(self) -> bool:
        """Whether texts with pictures begin as others do."""
        return self.store is None or not any(self.store.geometry.framed)

    async def close(self) -> None:
        """End the process that decodes."""
        if self.store is not None:
            await self.store.close()

    def _text_of(self, image: PreparedImage) -> str:
        assert self.store is not None
        before, after = self.store.geometry.around
        return f"{before}{self.store.expansion(image)}{after}"


def _is_read(match: re.Match[str]) -> bool:
    return match["url"].lower().startswith(_READ)


NO_IMAGES = ImagePrompts(None, ControlTokens(()))
