"""`python -m millrace_router`, which kills itself in a chosen place of a hand-over.

The new router, until it serves: `opened`, when it has read its files; `refuse`, there, where it ends with a message;
`warm-up`; `log`, when it has the log of keyed requests; `listening`. After that:
`token`, at the first one that it computes for the old router. The old router: `release`, when it is to release the
shards; `released`, when it has; `relay`, at the first token that it gets.
"""

from __future__ import annotations

import sys

from millrace_router.__main__ import main
from millrace_router.engine.relay import Feed, Relay
from millrace_router.hand_over import HandOver
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.server.run_log import RunLog
from millrace_router.shards.group import ShardGroup
from millrace_router.start.shards import StartupError
from millrace_testing.places import always, die, wrap

PLACES = (
    (LauncherChannel, "opened", "opened", False),
    (ShardGroup, "warm_up", "warm-up", False),
    (RunLog, "restored", "log", False),
    (LauncherChannel, "listening", "listening", False),
    (Feed, "token", "token", True),
    (HandOver, "_release", "release", False),
    (LauncherChannel, "released", "released", False),
    (Relay, "_take", "relay", False),
)


def refuse(*_: object) -> None:
    """End as a router does whose flags are wrong."""
    raise StartupError("the new router refuses to start")


if __name__ == "__main__":
    for owner, name, place, is_after in PLACES:
        wrap(owner, name, place, always, die, is_after=is_after)
    wrap(LauncherChannel, "opened", "refuse", always, refuse)
    sys.exit(main())
