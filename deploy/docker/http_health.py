"""Container health check of router and launcher: exit 0 if `/health` answers 200 on AIP_HTTP_PORT, or else PORT."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 5


def main() -> int:
    """Ask once."""
    port = os.environ.get("AIP_HTTP_PORT") or os.environ["PORT"]
    url = f"http://127.0.0.1:{port}/health"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, TimeoutError) as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
