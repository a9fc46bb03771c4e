"""The prompt at the beginning of a text completion's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, and the position in it where each token begins."""

    text: str
    starts: Sequence[int]


async def echo_of(
    tokenizer: Tokenizer, prompt: str | tuple[int, ...], *, adds_special_tokens: bool = True
) -> Echo:
    """Make the text of a prompt, which is a text or token ids, off the event loop; raises TokenizerError."""
    if isinstance(prompt, str):
        pairs = await tokenizer.in_thread(
            lambda: tokenizer.encode_with_starts(prompt, add_special_tokens=adds_special_tokens)
        )
        return Echo(prompt, [start for _, start in pairs])
    return await tokenizer.in_thread(lambda: _spelled(tokenizer, prompt))


def _spelled(tokenizer: Tokenizer, ids: tuple[int, ...]) -> Echo:
    """Decode `ids` without special tokens, as in generated text."""
    detokenizer = IncrementalDetokenizer(tokenizer, ())
    texts, starts, length = [], [], 0
    for id_ in ids:
        is_special = tokenizer.is_special(id_)
        text = detokenizer.flush() if is_special else detokenizer.step(id_)
        starts.append(length + len(text) if is_special else length)
        texts.append(text)
        length += len(text)
    texts.append(detokenizer.flush())
    text, whole = "".join(texts), tokenizer.decode(ids, skip_special_tokens=True)
    # Some decoders drop the space before a text's first word, and nothing else.
    num_dropped = len(text) - len(whole) if text.endswith(whole) else 0
    return Echo(text[num_dropped:], [max(start - num_dropped, 0) for start in starts])
