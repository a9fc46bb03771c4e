"""Inputs whose groups are scattered: `g_idx` tells the group of each."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.model_loader.quantized.cut import Cut
from millrace_shard.model_loader.quantized.module_tensors import ModuleTensors


def input_order(tensors: ModuleTensors, kind: str, cut: Cut, group_size: int) -> Tensor | None:
    """The inputs [in] int64 in the order of their groups; None if input i is in group i // group_size.

    Raises WeightsError for groups that do not exist, that have other sizes, or that a rank has only a part of.
    """
    found = tensors.read(kind, [(cut.inputs,)], [torch.int32, torch.int64]).long()
    usual = torch.arange(cut.inputs) // group_size
    if torch.equal(found, usual):
        return None
    num_groups = int(usual[-1]) + 1
    if found.min() < 0 or found.max() >= num_groups:
        wrong = int(found.min() if found.min() < 0 else found.max())
        raise tensors.error(kind, f"names group {wrong} of {num_groups}")
    order = found.argsort(stable=True)
    if not torch.equal(found[order], usual):
        raise tensors.error(kind, f"has groups of other sizes than {group_size}")
    if not cut.has_all_inputs:
        raise tensors.error(
            kind, "scatters the inputs of a group, so one shard alone can serve this model"
        )
    return order
