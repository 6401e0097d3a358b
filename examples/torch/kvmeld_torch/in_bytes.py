# SPDX-License-Identifier: MIT
"""Budgets in bytes: the slots that follow."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from ._library import ops
from .heads import NUMBERS, Policy, memory_row

_UNITS = {"%": 0.01, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Head:
    """What the bytes of a KV head depend on, beside its policy and its slots."""

    dim: int
    value_dim: int
    group: int
    rows: str  # as make_storage reads it
    count: int  # of such heads in a sequence: in all layers that are compressed, on all ranks


@lru_cache
def allocated(policy: str, head: Head, capacity: int) -> tuple[int, int]:
    """Bytes of each slot of a head, and of what it has beside them, as `Heads` has them."""
    about = Policy(policy).describe(max(head.dim, head.value_dim), head.group, capacity)
    key, value, in_half, means = ops.row_sizes(head.rows, head.dim, head.value_dim)
    slot = key + value + 4 + 4 + 4 * about["columns"]  # log-mass, position
    beside = 4 + 4 + 3 * 8 + 8 + 4 * memory_row(about["memory"])  # length, seen, measured; packed, its capacity
    if head.rows not in NUMBERS:
        beside += 2 * (in_half * (head.dim + head.value_dim) + means) + 4
    return slot, beside


@dataclass(frozen=True)
class Bytes:
    """Of each sequence: a share of what its tokens take in 16 bits, or an amount."""

    share: float = 0.0
    amount: int = 0

    @classmethod
    def of(cls, given: float | str) -> Self:
        """0.1 or "10%", 64 << 20 or "64MiB". Refused: anything else."""
        number, unit = given, ""
        if isinstance(given, str):
            found = re.fullmatch(r"(\d+(?:\.\d+)?)(%|KiB|MiB|GiB)", given)
            number, unit = (float(found[1]) * _UNITS[found[2]], found[2]) if found else (0, "")
        is_share = unit == "%" or (not unit and number <= 1)
        if not 0 < number <= (1 if is_share else 1e15) or (not is_share and not unit and number != int(number)):
            raise ValueError(f'Cache: expected bytes as 0.1, "10%", 64 << 20 or "64MiB", got {given!r}')
        return cls(share=float(number)) if is_share else cls(amount=int(number))

    def slots(self, seen: int, head: Head, policy: str) -> int:
        """Of a head, with the place of a decode step's token. All heads have as many, or share them."""
        in_half = 2 * (head.dim + head.value_dim) * seen
        room = self.share * in_half if self.share else self.amount / head.count

        def within(capacity: int) -> int:
            slot, beside = allocated(policy, head, capacity)
            return int((room - beside) // slot) - 1

        slots = within(seen)
        return slots if slots < seen else within(slots + 1)

    def least(self, slots: int, head: Head, policy: str, seen: int) -> int:
        """The amount that has room for so many."""
        slot, beside = allocated(policy, head, max(seen, slots + 1))
        return head.count * (beside + slot * (slots + 1))
