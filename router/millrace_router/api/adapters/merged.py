"""LoRAX's object for several adapters at a time, with its checks and messages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from millrace_router.api.fields import Float32, Items, NullIs, RequestModel
from millrace_router.errors import ValidationError
from millrace_router.request.adapter import MergeRecipe, MergeStrategy, SignMethod

MAX_MERGED_ADAPTERS = 32
_PRUNING = frozenset({MergeStrategy.TIES, MergeStrategy.DARE_LINEAR, MergeStrategy.DARE_TIES})


class MergedAdapters(RequestModel):
    """Several adapters with a weight each."""

    ids: Annotated[Items[str], NullIs(list)] = Field(default_factory=list)
    weights: Items[Float32] | None = None
    """1 each when absent."""
    merge_strategy: str | None = None
    """`linear` when absent; `cat`, the exact weighted sum, is not in LoRAX."""
    density: Float32 | None = None
    """The share of parameters that `ties`, `dare_linear` and `dare_ties` keep."""
    majority_sign_method: str | None = None

    def recipe(self) -> MergeRecipe:
        """Check, and translate; raises ValidationError."""
        if not self.ids:
            raise ValidationError(
                "at least one adapter ID must be provided when setting `adapters`"
            )
        if len(self.ids) > MAX_MERGED_ADAPTERS:
            raise ValidationError(
                f"`ids` must be at most {MAX_MERGED_ADAPTERS}. Given: {len(self.ids)}"
            )
        weights = (1.0,) * len(self.ids) if self.weights is None else tuple(self.weights)
        if len(weights) != len(self.ids):
            raise ValidationError("number of adapter IDs must match number of adapter weights")
        strategy = self._strategy()
        return MergeRecipe(
            ids=tuple(self.ids),
            weights=weights,
            strategy=strategy,
            density=self._density(strategy),
            majority_sign_method=self._sign_method(),
        )

    def _strategy(self) -> MergeStrategy:
        try:
            return MergeStrategy(self.merge_strategy or MergeStrategy.LINEAR)
        except ValueError:
            words = ", ".join(f"`{word}`" for word in MergeStrategy)
            raise ValidationError(f"`merge_strategy` must be one of {words}") from None

    def _density(self, strategy: MergeStrategy) -> float:
        if strategy not in _PRUNING:
            return 1.0
        if self.density is None or not 0 < self.density <= 1:
            raise ValidationError(
                f"`density` must be > 0.0 and <= 1.0 with the strategy `{strategy}`"
            )
        return self.density

    def _sign_method(self) -> SignMethod:
        try:
            return SignMethod(self.majority_sign_method or SignMethod.TOTAL)
        except ValueError:
            raise ValidationError("`majority_sign_method` must be `total` or `frequency`") from None
