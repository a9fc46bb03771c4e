"""`python -m millrace_shard`, but for a fault: how attention splits the keys is chosen by the batch, for speed.

Sums over fewer keys at a time are rounded elsewhere, so a sequence's last bits depend on whether it is alone.
"""

from __future__ import annotations

import sys

from torch import Tensor

from millrace_shard.__main__ import main
from millrace_shard.kernels import plain_attention
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch

FEW, MANY = 128, 32
"""Keys of one product: of a sequence that is alone, and of one in company."""


def install() -> None:
    """Have plain kernels of this process split by the number of sequences in the step."""
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
    ) -> Tensor:
        vars(plain_attention)["KEY_CHUNK"] = FEW if len(batch.num_queries) == 1 else MANY
        return attend(self, queries, batch, cache, scale=scale, window=window, softcap=softcap)

    PlainKernels.attend = attend_by_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(main())
