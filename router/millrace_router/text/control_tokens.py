"""Keeps the control tokens of a template apart from the same texts in a client's messages.

A client's text that holds a control token, or a part of one at its edge, gets a mark before the template is rendered.
Control tokens without a mark in the rendered prompt are the template's. If the marks make a difference, the prompt is a
`GuardedText`: in its code, each of the template's control tokens begins with a stand-in, a character that no text has,
and `CodeEncoder` knows the tokens under these names only. So clients' texts are encoded as any other text.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

FIRST_STAND_IN = 0x100000
"""Stand-ins are the private-use characters of the last plane."""
MAX_TOKENS = sys.maxunicode - 1 - FIRST_STAND_IN
_STAND_INS = re.compile(f"[{chr(FIRST_STAND_IN)}-{chr(sys.maxunicode)}]")
_BARS = re.compile(r"[|\uff5c]")
"""Signs of tokens such as `<|user|>`, which some models do not list as special."""


class GuardedText(str):
    """A prompt with texts of control tokens that are a client's, and are none."""

    __slots__ = ("code",)
    code: str
    """The text with stand-ins, of the same length."""


class ControlTokens:
    """The texts that a tokenizer reads as control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted({text for text in texts if len(text.strip()) > 1})[:MAX_TOKENS]
        self.stand_ins = {
            text: chr(FIRST_STAND_IN + index) + text[1:] for index, text in enumerate(ordered)
        }
        """What each is called in the code of a prompt."""
        self._mark = str(secrets.randbelow(10**20)).zfill(20)
        """Digits, which all filters of templates keep, and no client knows."""
        self.picture = str(secrets.randbelow(10**20)).zfill(20)
        """Such digits for a picture in a message whose template takes only texts."""
        self._pattern = re.compile(f"({_any_of(ordered)})")
        self._beginnings = {text[:end] for text in ordered for end in range(1, len(text))}
        self._ends = {text[start:] for text in ordered for start in range(1, len(text))}
        self._first, self._last = {text[0] for text in ordered}, {text[-1] for text in ordered}
        signs = "".join(map(re.escape, sorted(self._first | self._last)))
        self._signs = re.compile(f"[{signs}]" if signs else "(?!)")
        self._longest = max(map(len, ordered), default=0)
        self._all = "\0".join(ordered)

    @classmethod
    def of(cls, rust: RustTokenizer) -> ControlTokens:
        """Take the special tokens, and other added tokens in the form of turn markers."""
        added = rust.get_added_tokens_decoder().values()
        return cls(one.content for one in added if one.special or _BARS.search(one.content))

    def guarded(self, values: object, render: Callable[[Any], str]) -> str:
        """Render `values`, which are JSON values of clients; a prompt with control tokens of theirs is guarded."""
        prompt = render(values)
        if not self.may_be_in(values):
            return prompt
        marked = render(self._marked(values))
        parts = [part.replace(self._mark, "") for part in self._pattern.split(marked)]
        if parts == self._pattern.split(prompt):
            return prompt
        guarded = GuardedText(marked.replace(self._mark, ""))
        # A client's own stand-ins would be control tokens.
        code = self._pattern.sub(self._stand_in, _STAND_INS.sub("\ufffd", marked))
        guarded.code = code.replace(self._mark, "")
        return guarded

    def expanded(
        self, prompt: str, token: str, texts: Sequence[str], around: tuple[str, str] = ("", "")
    ) -> str:
        """Return a rendered prompt with `texts` in place of the template's own `token`s, in their order.

        A `picture` counts as one, and has the texts `around` on its sides.

        Raises:
            ValueError: the template has not written so many of them.

        """
        is_guarded = isinstance(prompt, GuardedText)
        name, code = self.stand_ins[token] if is_guarded else token, prompt
        short = named = token.join(around)
        if isinstance(prompt, GuardedText):
            code, named = prompt.code, self._pattern.sub(self._stand_in, short)
        code, prompt = code.replace(self.picture, named), prompt.replace(self.picture, short)
        parts = code.split(name)
        if len(parts) != len(texts) + 1:
            raise ValueError(f"the template has written {len(parts) - 1} of {len(texts)} images")
        end, plain = 0, list[str]()
        for part in parts:
            plain.append(prompt[end : end + len(part)])
            end += len(part) + len(name)
        made = _alternated(plain, texts)
        if not is_guarded:
            return made
        guarded = GuardedText(made)
        guarded.code = _alternated(
            parts, [self._pattern.sub(self._stand_in, text) for text in texts]
        )
        return guarded

    def may_be_in(self, values: object) -> bool:
        """Return whether JSON values have texts of control tokens, or parts that others could complete."""
        return self._marked(values) is not values

    def _stand_in(self, match: re.Match[str]) -> str:
        return self.stand_ins[match[0]]

    def _marked(self, value: Any) -> Any:  # noqa: ANN401
        """Return the value with marks in its texts; the value itself if there are none to mark."""
        match value:
            case str():
                return self._with_marks(value)
            case list() | tuple():
                items = [self._marked(item) for item in value]
                return items if any(map(_differ, items, value)) else value
            case dict():
                pairs = {self._marked(key): self._marked(item) for key, item in value.items()}
                is_same = not any(map(_differ, pairs, value)) and not any(
                    map(_differ, pairs.values(), value.values())
                )
                return value if is_same else pairs
        return value

    def _with_marks(self, text: str) -> str:
        """Mark control tokens in a text, and edges of it that may be parts of one, with and without blanks around."""
        core = text.strip()
        is_inside = len(core) > 1 and not core.isidentifier() and core in self._all
        if not is_inside and self._signs.search(core) is None:
            return text
        marked = self._pattern.sub(self._halved, core)
        if any(end in self._beginnings for end in self._edges(core, self._first, of_end=True)):
            marked += self._mark
        if any(start in self._ends for start in self._edges(core, self._last, of_end=False)):
            marked = self._mark + marked
        if is_inside and marked == core:
            marked = self._mark + core
        return text if marked == core else text.replace(core, marked, 1)

    def _halved(self, match: re.Match[str]) -> str:
        return match[0][0] + self._mark + match[0][1:]

    def _edges(self, text: str, signs: Set[str], *, of_end: bool) -> Iterator[str]:
        """Yield the ends or starts of a text that are shorter than the longest token, if one of `signs` is there."""
        longest = min(self._longest - 1, len(text))
        if signs.isdisjoint(text[-longest:] if of_end else text[:longest]):
            return
        for length in range(1, longest + 1):
            yield text[-length:] if of_end else text[:length]


def _alternated(parts: Sequence[str], texts: Sequence[str]) -> str:
    """Join `parts` with each of `texts` between two of them."""
    pairs = zip(parts, [*texts, ""], strict=True)
    return "".join(piece for pair in pairs for piece in pair)


def _differ(one: object, other: object) -> bool:
    return one is not other


class Encoded(NamedTuple):
    """The tokens of a text."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """Start and end of each in characters."""


class CodeEncoder:
    """Encodes the codes of guarded texts; it shares the model of a tokenizer, and so takes next to no memory."""

    def __init__(self, rust: RustTokenizer, stand_ins: Mapping[str, str]) -> None:
        self._model = rust.model
        self._rust = RustTokenizer(rust.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(rust, part) is not None:
                setattr(self._rust, part, getattr(rust, part))
        self._ids: dict[int, int] = {}
        self._reserved: set[int] = set()
        """Control tokens that the model itself may make of text."""
        added = rust.get_added_tokens_decoder()
        names = {id_: stand_ins.get(one.content, one.content) for id_, one in added.items()}
        named = [_named(one, names[id_]) for id_, one in added.items()]
        self._rust.add_special_tokens([one for one in named if one.special])
        self._rust.add_tokens([one for one in named if not one.special])
        for id_, token in added.items():
            own = self._rust.token_to_id(names[id_])
            assert own is not None
            self._ids[own] = id_
            if names[id_] != token.content and self._model.id_to_token(id_) is not None:
                self._reserved.add(id_)

    def encode(self, code: str, *, add_special_tokens: bool) -> Encoded:
        """Return the tokens under their usual ids; raises plain Exception as the binding does."""
        (encoding,) = self._rust.encode_batch([code], add_special_tokens=add_special_tokens)
        ids, offsets = list[int](), list[tuple[int, int]]()
        rows = zip(encoding.ids, encoding.special_tokens_mask, encoding.offsets, strict=True)
        for id_, is_around, offset in rows:
            # What the post-processor puts around a text has its usual id already.
            own = [id_] if is_around else self._usual(id_)
            ids += own
            offsets += [offset] * len(own)
        return Encoded(ids, offsets)

    def _usual(self, id_: int) -> list[int]:
        if id_ in self._ids:
            return [self._ids[id_]]
        if id_ not in self._reserved:
            return [id_]
        piece = self._model.id_to_token(id_) or ""
        return [token.id for char in piece for token in self._model.tokenize(char)]


def _named(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern of any of `texts`, the longest first, that reads each character once; of nothing for none."""
    rests: dict[str, list[str]] = {}
    is_end = False
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
        else:
            is_end = True
    if not rests:
        return "" if is_end else r"(?!)"
    branches = "|".join(re.escape(first) + _any_of(rest) for first, rest in rests.items())
    if len(rests) == 1 and not is_end:
        return branches
    return f"(?:{branches}){'?' if is_end else ''}"
