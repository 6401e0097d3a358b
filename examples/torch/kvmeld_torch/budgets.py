# SPDX-License-Identifier: MIT
"""A layer's slots divided over its KV heads by scores, also where the heads lie on several ranks.

AdaKV's rule (arXiv 2407.11550): each head its own `floor` best slots, then the best of all heads. Scores are compared
by their exponent and four bits more, so that a histogram says all: ranks add theirs in one all-reduce, and every rank,
or one process with all heads, divides the same counts in the same way. Within the bin where the budget ends, heads get
shares of what is left in proportion to their slots there.
"""

import torch
import torch.distributed as dist
from torch import Tensor

_DROPPED = 19  # bits of a float: what is left is 8 of the exponent and 4 of the fraction
BINS = 1 << (31 - _DROPPED)


def histogram(scores: Tensor, lengths: Tensor) -> Tensor:
    """Counts [heads, BINS] of the first `lengths` of scores [heads, slots], the best bin first.

    What is negative or NaN is in the last one.
    """
    bits = torch.where(scores > 0, scores, 0).float().contiguous().view(torch.int32)
    counts = torch.zeros(scores.shape[0], BINS, dtype=torch.int64, device=scores.device)
    held = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    return counts.scatter_add_(1, (BINS - 1 - (bits >> _DROPPED)).long(), held.long())


def all_heads(counts: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Of histograms [..., heads, BINS] those of all ranks' heads, in the ranks' order: one all-reduce."""
    heads, rank = counts.shape[-2], dist.get_rank(group)
    all_counts = counts.new_zeros(*counts.shape[:-2], heads * dist.get_world_size(group), BINS)
    all_counts[..., rank * heads : (rank + 1) * heads, :] = counts
    dist.all_reduce(all_counts, group=group)
    return all_counts


def divide(counts: Tensor, total: int, floor: int) -> list[int]:
    """Slots of every head of counts [heads, BINS]: they sum to `total`, and none is below `floor`.

    Where heads hold less than `total`, each gets what it holds, and as much more as the others.
    """
    counts = counts.cpu()
    heads, held = counts.shape[0], counts.sum(1)
    if not heads * floor <= total or floor > int(held.min()):
        raise ValueError(f"divide: expected at least {floor} slots for each of {heads} heads, got {total} in total")
    more = max(total - int(held.sum()), 0) // heads
    total = min(total, int(held.sum()))
    reached = counts.cumsum(1)
    rest = (reached - floor).clamp(min=0).diff(dim=1, prepend=torch.zeros(heads, 1, dtype=counts.dtype))
    left = total - heads * floor
    ends = rest.sum(0).cumsum(0)
    border = int((ends < left).sum())  # the bin where the budget ends
    budget = [floor + more + int(n) for n in rest[:, :border].sum(1)]
    left -= int(ends[border - 1]) if border else 0
    if left == 0:
        return budget
    there = rest[:, border].tolist()
    shares = [left * n // sum(there) for n in there]
    remainder = sorted(range(heads), key=lambda h: (-(left * there[h] % sum(there)), h))
    for h in remainder[: left - sum(shares)]:
        shares[h] += 1
    return [n + share for n, share in zip(budget, shares)]
