"""A process that makes calls for `GrammarProcess`, so that a megabyte of schema does not hold the event loop up.

`python -m millrace_router.validation.grammar_worker`: pickles on standard input, each a function and its arguments; for
each a pickle on standard output: whether there is a result, and the result, or else class and arguments of a
`RouterError`. It ends when standard input does, and so with the router, however that ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

from millrace_router.errors import RouterError

NICENESS = 19
"""A forward pass goes before, and so does the router."""


def main() -> int:
    """Answer until standard input ends."""
    # Ctrl-C reaches all processes of a terminal; the router is the one to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return 0
        answer: tuple[bool, Any]
        try:
            answer = (True, function(*arguments))
        except RouterError as error:
            # Pickled as it is, it would get the beginning of its message once more.
            answer = (False, (type(error), error.args))
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
