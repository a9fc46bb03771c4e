"""`python -m millrace_shard` with a fault: attention splits the keys by the size of the batch.

Other splits round at other places, so the last bits of a sequence depend on the batch.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from millrace_shard.__main__ import main
from millrace_shard.kernels import plain_attention
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch

FEW, MANY = 128, 32
"""Keys per product: of a sequence alone, and of one in a larger batch."""


def install() -> None:
    """Make the plain kernels of this process split by the number of sequences in the step."""
    attend = PlainKernels.attend

    def attend_by_batch(
        self: PlainKernels,
        queries: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        vars(plain_attention)["KEY_CHUNK"] = FEW if len(batch.num_queries) == 1 else MANY
        rule: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        return attend(self, queries, batch, cache, **rule, sinks=sinks)

    PlainKernels.attend = attend_by_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(main())
