# SPDX-License-Identifier: MIT
"""Ranks that share a model by its heads; one process is one rank."""

import torch.distributed as dist
from torch import Tensor


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def total(x: Tensor) -> Tensor:
    """The sum over all ranks, in its place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def largest(x: Tensor) -> Tensor:
    """The largest of all ranks, in its place."""
    if dist.is_initialized():
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def leave() -> None:
    """The end of a program, on every rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
