"""Time between tokens, without looking at each of them."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.simulator.distribution import Distribution


class Gaps:
    """Inter-token times of all streams, by how many of them had their last token when.

    Nearly always every stream had its last token with the same step, so a step costs the same for 1 and for 1000
    streams. Exact but where some streams miss a step for want of blocks while others do not: those which had their
    last token latest are taken to go on first.
    """

    def __init__(self, seconds: Distribution) -> None:
        self._seconds = seconds
        self._streams: list[tuple[float, int]] = []
        """(when their last token came, how many), the latest last."""

    def step(self, now: float, *, decoded: int, joined: int, ended: int) -> None:
        """Count a step that was answered `now`.

        `decoded` streams got another token, `joined` ones their first since admission, and `ended` of all these
        their last.
        """
        streams, num_left = self._streams, decoded
        while num_left and streams:
            last, count = streams.pop()
            taken = min(count, num_left)
            self._seconds.add(now - last, taken)
            if taken < count:
                streams.append((last, count - taken))
            num_left -= taken
        if decoded + joined > ended:
            streams.append((now, decoded + joined - ended))

    def steps(self, times: Sequence[float], *, decoded: int) -> None:
        """Count steps that were answered at `times`, in each of which the same streams got a token and none ended."""
        for now in times:
            last, count = self._streams[-1] if self._streams else (now, 0)
            if count == decoded:
                # What `step` would do.
                self._seconds.add(now - last, count)
                self._streams[-1] = (now, count)
            else:
                self.step(now, decoded=decoded, joined=0, ended=0)

    def leave(self, last: float) -> None:
        """Forget a stream that was preempted, and had its last token at the time `last`."""
        streams = self._streams
        for place in reversed(range(len(streams))):
            time, count = streams[place]
            if time <= last or place == 0:
                streams[place] = time, count - 1
                if count == 1:
                    del streams[place]
                return
