"""`python -m millrace_ray SPEC`: a child of the launcher, which joins the cluster at RAY_ADDRESS.

It prints a line for the launcher whenever the ranks are placed, and ends with 1 and a sentence when they cannot be.
Ray removes the placement group and its actors when this process ends, however it ends.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from millrace_ray.spec import Files, Spec, placed_line

HOST_AND_PORT = re.compile(r"([\w.-]+|\[[\da-fA-F:]+\]):(\d+)")
CONNECT_SECONDS = 10.0


def main() -> None:
    """Place the ranks until killed."""
    spec = Spec.from_json(sys.argv[1])
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        refuse("--cluster ray needs RAY_ADDRESS, such as host:6379 of the head node")
    try:
        import ray  # noqa: PLC0415
    except ImportError:
        refuse(
            "Ray is not installed: run `pip install '.[ray]'` in a checkout, here and on the cluster's hosts"
        )
    from millrace_ray.placement import ClusterError, Placement  # noqa: PLC0415

    check_listening(address)
    try:
        ray.init(address=address, log_to_driver=True, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        refuse(f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}")
    try:
        Placement(spec, _tell).run()
    except ClusterError as error:
        refuse(str(error))


def check_listening(address: str) -> None:
    """Refuse an address at which no process listens, which Ray itself tries for minutes."""
    found = HOST_AND_PORT.fullmatch(address)
    if found is None:
        return
    host, port = found[1].strip("[]"), int(found[2])
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        refuse(f"there is no Ray cluster at {address}: {error}")


def _tell(addresses: Sequence[str], files: Files) -> None:
    sys.stdout.write(placed_line(addresses, files) + "\n")
    sys.stdout.flush()


def refuse(message: str) -> NoReturn:
    """End with a sentence in the form of the launcher's other children."""
    line = {"level": "ERROR", "fields": {"message": message}, "target": "millrace_ray"}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
