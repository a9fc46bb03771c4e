"""A sequence in both planes besides its sampling: its grammar, and what its prompt yields without tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace_proto import generate_pb2 as pb


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole generated text of a sequence matches."""

    kind: GrammarKind
    source: str

    def to_pb(self, message: pb.Grammar) -> pb.Grammar:
        """Write the grammar into `message`, and return that."""
        message.kind = message.Kind.Value(f"KIND_{self.kind.name}")
        message.source = self.source
        return message

    @classmethod
    def from_pb(cls, message: pb.Grammar) -> Grammar:
        """Read a grammar; an unknown kind counts as a regular expression, as in TGI."""
        names = {message.Kind.Value(f"KIND_{kind.name}"): kind for kind in GrammarKind}
        return Grammar(names.get(message.kind, GrammarKind.REGEX), message.source)


@dataclass(frozen=True, slots=True)
class Pooling:
    """The last token of the prompt yields its hidden state, or the logits of some ids; no token is generated."""

    logit_ids: tuple[int, ...] = ()
    """Empty: the hidden state after the last norm."""
