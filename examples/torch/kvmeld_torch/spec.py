# SPDX-License-Identifier: MIT
"""What a layer's attention computes, as the operators take it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """logit = cap(scale * q.k) + slope * distance + log-mass; a softmax of these and of a sink."""

    group: int = 1  # query heads per KV head
    scale: float = 0.0  # 0: 1/sqrt(dim)
    rope: tuple[float, ...] = ()  # radians per position, of each pair of dims that rotates
    interleaved: bool = False  # pairs (2i, 2i + 1), not (i, i + number of pairs)
    last: bool = False  # the pairs are of a head's last dims, not its first
    soft_cap: float = 0.0  # 0: none
    sinks: tuple[float, ...] = ()  # a logit of each query head of a sequence
    slopes: tuple[float, ...] = ()  # ALiBi's of each query head of a sequence

    @cached_property
    def options(self) -> dict[str, int | float | Tensor | None]:
        """Of every operator that takes a cache."""
        lists = [n for x in (self.rope, self.sinks, self.slopes) for n in (len(x), *x)]
        numbers = [self.soft_cap, float(self.interleaved), float(self.last), *lists]
        terms = torch.tensor(numbers, dtype=torch.float64) if any(numbers) else None
        return {"group": self.group, "scale": self.scale, "terms": terms}
