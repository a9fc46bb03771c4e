"""The tokens of one answer over all its choices: where they are recorded, and those that it had in another process.

An answer that was begun by a router that is gone is continued by the next one: the tokens of each choice are accepted
again, so that its text and its events are the same, and the generation goes on behind them. Sampling depends only on
seed and position, so the rest is the same, too.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol


class KnownToken(NamedTuple):
    """A token that a choice of an answer has got."""

    choice: int
    """From 0, over all prompts of the request."""
    id: int
    logprob: float
    """In float32."""
    closed: bool = False
    """Whether the limit of tokens, and not the model, ends the text."""


class Beginning(NamedTuple):
    """Facts that are logged with the first token of a choice."""

    cached_tokens: int
    """Tokens of the prompt that were in the prefix cache, which usage reports."""
    check: int
    """`entry.check_of` the request."""


TokenWriter = Callable[[int, float, bool], None]


class TokenRecorder(Protocol):
    """Keeps the tokens of one answer; no method raises."""

    @property
    def number(self) -> int | None:
        """Its number in the log of keyed requests; None if it is not there."""

    def begin(self, choice: int, beginning: Beginning, /) -> None:
        """Note what is known with the first token of a choice."""

    def writer(self, choice: int, /) -> TokenWriter:
        """Return what notes the next token of a choice: id, log probability, and whether its text is closed."""

    def flush(self) -> None:
        """Keep the tokens of all answers that have been noted."""

    def expand(self, expanded: bytes, /) -> None:
        """Keep the `input` of the request with what it refers to, which the next router does not have."""


class Choice:
    """One choice of an answer."""

    def __init__(
        self,
        answer: Answer,
        number: int,
        known: Sequence[KnownToken] = (),
        beginning: Beginning | None = None,
    ) -> None:
        """`known` are the tokens that it has already; with them, `beginning` is known too."""
        self.number = number
        self.known = known
        self.beginning = beginning
        self.renders_known = answer.renders_known
        self._answer = answer
        self._write = answer.recorder.writer(number)

    @property
    def run_number(self) -> int | None:
        """`TokenRecorder.number` of its answer."""
        return self._answer.recorder.number

    def begin(self, beginning: Beginning) -> None:
        self._answer.recorder.begin(self.number, beginning)

    def token(self, token_id: int, logprob: float, closed: bool) -> None:  # noqa: FBT001
        """Note the next token, which is kept with `flush`."""
        if self._answer.order is not None:
            self._answer.order.append(self.number)
        self._write(token_id, logprob, closed)

    def flush(self) -> None:
        """Keep the tokens of all answers that have been noted."""
        self._answer.recorder.flush()


class Answer:
    """The choices of one answer, in the order in which they are started."""

    def __init__(
        self,
        recorder: TokenRecorder,
        tokens: Iterable[KnownToken] = (),
        beginnings: Mapping[int, Beginning] | None = None,
        *,
        renders_known: bool = True,
    ) -> None:
        """`tokens` are known, in the order in which the choices got them, and `beginnings` of their choices.

        With `renders_known` an answer shows them again, with all that belongs to them.
        """
        self.recorder = recorder
        self.renders_known = renders_known
        self._beginnings = beginnings or {}
        self._numbers = count()
        self._known: defaultdict[int, list[KnownToken]] = defaultdict(list)
        self.order: array[int] | None = array("I")
        """The choice of each token so far, until `take_order`."""
        for token in tokens:
            self._known[token.choice].append(token)
            self.order.append(token.choice)

    def next_choice(self) -> Choice:
        """Return the choice that is started next."""
        number = next(self._numbers)
        return Choice(self, number, self._known.pop(number, []), self._beginnings.get(number))

    def take_order(self) -> Sequence[int]:
        """Return the choice of each token so far; from now on it is not kept."""
        order, self.order = self.order, None
        return order or ()


class Held(Protocol):
    """A generation whose tokens wait for their turn."""

    @property
    def ended(self) -> bool:
        """Whether no further token will come."""

    @property
    def is_connected(self) -> bool:
        """Whether tokens that are passed on go to a sink."""

    @property
    def num_held(self) -> int:
        """Tokens that are kept."""

    def hold(self, on_token: Callable[[], None], on_connect: Callable[[], None], /) -> None:
        """Keep all tokens until `release`; call `on_token` with each, and `on_connect` when a sink is connected."""

    def pass_on(self) -> bool:
        """Pass the oldest token on; False if none is kept."""

    def release(self) -> None:
        """Pass on all tokens, and further ones when they come."""


class Turns:
    """Passes the tokens of the choices of one stream on in the order in which they were known, then as they come.

    So the events of a stream that is continued have the numbers that they had. Tokens of a choice that is connected
    only by the first token of another one are owed to it until then, as its stream has kept them.
    """

    def __init__(self, choices: Mapping[int, Held], order: Iterable[int]) -> None:
        """`order` has a key of `choices` for each token."""
        self._choices = choices
        self._order = deque(order)
        self._owed: Counter[int] = Counter()
        for number, choice in choices.items():
            choice.hold(self.advance, partial(self._pay, number))

    def advance(self) -> None:
        """Pass on what has its turn."""
        order = self._order
        while order:
            number = order[0]
            choice = self._choices[number]
            if not choice.is_connected:
                self._owed[number] += 1
            elif not self._may_pass(choice):
                return
            order.popleft()
            if choice.is_connected:
                # This may connect further choices.
                choice.pass_on()
        for choice in self._choices.values():
            choice.release()

    def _may_pass(self, choice: Held) -> bool:
        """Return whether a token is there, and those that are owed: it may connect their choices."""
        owed = self._owed.items()
        return (choice.num_held > 0 or choice.ended) and all(
            self._choices[number].num_held >= count or self._choices[number].ended
            for number, count in owed
        )

    def _pay(self, number: int) -> None:
        """Pass on what is owed to a choice, which is connected now."""
        for _ in range(self._owed.pop(number, 0)):
            self._choices[number].pass_on()
