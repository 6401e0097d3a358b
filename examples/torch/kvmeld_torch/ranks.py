# SPDX-License-Identifier: MIT
"""Ranks that share a model by its heads; one process is one rank."""

import torch.distributed as dist
from torch import Tensor


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def total(x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """The sum over all ranks, in its place, or what `op` says."""
    if dist.is_initialized():
        dist.all_reduce(x, op=op)
    return x


def all_heads(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """Of numbers [layers, heads, ...] those of all ranks' heads, in the ranks' order, by one all-reduce.

    Returns them, and which head is this rank's first.
    """
    heads, first = x.shape[1], x.shape[1] * dist.get_rank(group)
    gathered = x.new_zeros(x.shape[0], heads * dist.get_world_size(group), *x.shape[2:])
    gathered[:, first : first + heads] = x
    dist.all_reduce(gathered, group=group)
    return gathered, first


def leave() -> None:
    """The end of a program, on every rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
