"""Entrypoint of the image for SageMaker: translates SageMaker's variables and runs the launcher.

SageMaker passes the argument `serve`, which is ignored; settings come from variables alone, as in TGI's image.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

PROGRAM = "millrace-launcher"
VARIABLES = {
    "HF_MODEL_ID": "MODEL_ID",
    "HF_MODEL_REVISION": "REVISION",
    "HF_MODEL_QUANTIZE": "QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "TRUST_REMOTE_CODE",
    "SM_NUM_GPUS": "NUM_SHARD",
}


def main() -> NoReturn:
    """Run the launcher; exit with 1 if no model is named."""
    environment = dict(os.environ)
    for theirs, ours in VARIABLES.items():
        if value := environment.pop(theirs, ""):
            environment[ours] = value
    if not environment.get("MODEL_ID"):
        sys.exit("HF_MODEL_ID must be set")
    os.execvpe(PROGRAM, [PROGRAM], environment)  # noqa: S606 - the launcher, by the image's PATH


if __name__ == "__main__":
    main()
