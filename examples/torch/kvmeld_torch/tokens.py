# SPDX-License-Identifier: MIT
"""What comes in: the new tokens of a batch, and prompts until they are compressed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from .heads import Heads


@dataclass
class Tokens:
    """Of all sequences, some of them padding."""

    query: Tensor  # [batch, heads, tokens, dim]
    key: Tensor  # [batch, KV heads, tokens, dim]
    value: Tensor
    real: Tensor | None  # [batch, tokens]: what is no padding; None: all

    def sequences(self) -> Iterator[tuple[slice | Tensor, Tensor, Tensor, Tensor]]:
        """Of each: where its tokens are, q [KV heads, group, tokens, dim], k and v [KV heads, tokens, dim]."""
        kv_heads = self.key.shape[1]
        group = self.query.shape[1] // kv_heads
        for b, (query, key, value) in enumerate(zip(self.query, self.key, self.value)):
            at = self._places(b)
            yield at, query[:, at].unflatten(0, (kv_heads, group)), key[:, at], value[:, at]

    def _places(self, sequence: int) -> slice | Tensor:
        """A slice, so that nothing is copied, but for gaps behind tokens."""
        if self.real is None:
            return slice(None)
        at = self.real[sequence].nonzero().flatten()
        first = self.real.shape[1] - len(at)
        return slice(first, None) if len(at) == 0 or int(at[0]) == first else at

    def one_by_one(self) -> list[Self]:
        rows = [x.split(1, 2) for x in (self.query, self.key, self.value)]
        real = [None] * len(rows[0]) if self.real is None else self.real.split(1, 1)
        return [Tokens(*x) for x in zip(*rows, real)]


@dataclass
class Prompt:
    """One sequence's prompt in a layer, or what has come of it, until it is compressed."""

    heads: Heads
    slots: int  # of a head; of a head on average where heads share them
    queries: Tensor | None = None  # what `heads.compress` takes
    positions: Tensor | None = None
    part: int = 0  # tokens of the part that was just read
    has_come: bool = True  # False: no token since it was last compressed
    is_new: bool = True  # `queries` are those of new tokens, not yet measured
    divided: list[int] = field(default_factory=list)  # slots of each head, when it is known
