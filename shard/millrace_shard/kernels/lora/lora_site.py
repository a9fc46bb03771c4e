"""The linears of a model that adapters may change, and the operands that their operators take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from millrace_shard.kernels.lora.adapter_rows import AdapterRows

if TYPE_CHECKING:
    from millrace_shard.kernels.lora.adapter_table import AdapterTable

Packing = Literal["plain", "tiles", "slices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPart:
    """One module of the model, as PEFT names it, in the linear of this rank that computes it."""

    name: str
    """Such as "model.layers.0.self_attn.q_proj"."""
    inputs: int
    """Inputs of the whole module; `outputs` likewise."""
    outputs: int
    input_range: tuple[int, int]
    """The inputs that this rank multiplies."""
    output_range: tuple[int, int]
    """The outputs that this rank computes."""
    first_output: int = 0
    """The place of `output_range[0]` among the outputs of the linear."""
    adds_bias: bool = True
    """Whether this rank adds the bias of an adapter: one rank of those whose results are summed."""

    @property
    def num_inputs(self) -> int:
        """Inputs on this rank."""
        start, end = self.input_range
        return end - start

    @property
    def num_outputs(self) -> int:
        """Outputs on this rank."""
        start, end = self.output_range
        return end - start


@dataclass(slots=True, kw_only=True, eq=False)
class LoraSite:
    """A linear of this rank with the modules that it computes."""

    table: AdapterTable
    parts: tuple[LoraPart, ...]
    """In the order of the linear's outputs."""
    first: int
    """The place of the first part among all parts of the model; the others follow."""
    is_head: bool = False
    """Whether its rows are those whose logits are needed, instead of all tokens."""
    packing: Packing = "plain"
    """The layout of adapters for this linear, set by the kernels that make the linear.

    With "tiles", A and B are packed by `pack_lora_a` and `pack_lora_b`; with "slices", they lie
    slice by slice, see PackedPart. `lora_table` holds the addresses of both.
    """

    @property
    def rows(self) -> AdapterRows | None:
        """The adapters of the rows of the running product; None if no row has one."""
        return self.table.logit_rows if self.is_head else self.table.token_rows

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """`lora_rows` [T] int32 and `lora_table` of the running product; both are empty if no row has an adapter."""
        rows = self.rows
        if rows is None:
            return self.table.nothing
        return rows.slots, self.table.lora_table
