# SPDX-License-Identifier: MIT
"""KV heads in slots: tensors that the operators work on, and nothing else."""

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._library import ops
from .spec import Spec

_LINE = 16  # floats: a policy's memory has rows of whole cache lines
_BY_SLOT = ("keys", "values", "log_mass", "position")
BESIDE = ("newest_keys", "newest_values", "key_mean", "rounded")
_BY_HEAD = ("length", "seen", "memory", *BESIDE)
NUMBERS = {"float32": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def memory_row(floats: int) -> int:
    """Floats of a head's memory of which a policy needs so many."""
    return -(-floats // _LINE) * _LINE


@dataclass(frozen=True)
class Policy:
    """A policy's text, as kvmeld::make_policy reads it.

    "fold/90" is fold as it is where a model's heads share 90 slots each on average.
    """

    text: str

    def describe(self, dim: int = 1, group: int = 1, capacity: int = 1) -> dict[str, int]:
        names = "columns memory supports_decode evicts".split()
        return dict(zip(names, ops.describe(self.text, dim, group, capacity)))

    def initial(self, columns: Tensor) -> Tensor:
        """What `columns` [heads, columns, slots] are of slots that nothing was observed of: [columns, 1]."""
        return columns.new_tensor(ops.initial_columns(self.text))[:, None]

    @property
    def name(self) -> str:
        return self.text.partition("/")[0].partition(":")[0]


@dataclass
class Heads:
    """`heads` KV heads with places for `capacity` tokens each.

    Every head has its own length. Keys and values may have any strides; the rest is contiguous.
    Packed, each head has its own capacity, and the places of all heads lie in a row.
    """

    policy: Policy
    spec: Spec
    keys: Tensor  # [heads, capacity, dim] float32, float16 or bfloat16; in few bits bytes of each row
    values: Tensor  # [heads, capacity, value dim]
    log_mass: Tensor  # [heads, capacity] float32
    position: Tensor  # [heads, capacity] int32
    length: Tensor  # [heads] int32: slots in use
    seen: Tensor  # [heads] int32: tokens ever appended, the next one's position
    columns: Tensor  # [heads, columns, capacity] float32: the policy's, by slot
    memory: Tensor  # [heads, floats] float32: the policy's own
    measured: Tensor  # [heads, 3] int64: slots with columns, queries observed, memory's capacity; packed, its own
    # Where rows are in few bits, on the CPU:
    newest_keys: Tensor | None = None  # [heads, rows in half, dim] float16
    newest_values: Tensor | None = None
    key_mean: Tensor | None = None  # [heads, dim] float16; [heads, 0]: keys are held as they are
    rounded: Tensor | None = None  # [heads] int32: tokens before it, but the first, lie in their slots

    @classmethod
    def over(
        cls, policy: Policy, spec: Spec, keys: Tensor, values: Tensor, *, tokens: int = 0
    ) -> Self:
        """Over an engine's keys and values, of which the first `tokens` rows are a prompt's. No copies."""
        heads, capacity, _ = keys.shape
        size = policy.describe(max(keys.shape[2], values.shape[2]), spec.group, capacity)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=keys.device)

        position = new(heads, capacity, dtype=torch.int32)
        position[:, :tokens] = torch.arange(tokens, dtype=torch.int32, device=keys.device)
        measured = new(heads, 3, dtype=torch.int64)
        measured[:, 2] = capacity
        columns = new(heads, size["columns"], capacity)
        columns += policy.initial(columns)
        return cls(
            policy,
            spec,
            keys,
            values,
            log_mass=new(heads, capacity),
            position=position,
            length=new(heads, dtype=torch.int32).fill_(tokens),
            seen=new(heads, dtype=torch.int32).fill_(tokens),
            columns=columns,
            memory=new(heads, memory_row(size["memory"])),
            measured=measured,
        )

    @classmethod
    def empty(
        cls,
        policy: Policy,
        spec: Spec,
        heads: int,
        capacity: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Of no tokens, in memory of its own."""
        keys, values = torch.zeros(2, heads, capacity, dim, dtype=dtype, device=device)
        return cls.over(policy, spec, keys, values)

    # ------------------------------------------------------------------ what the operators take

    @property
    def tensors(self) -> list[Tensor]:
        return [x for f in fields(self)[2:] if (x := getattr(self, f.name)) is not None]

    @property
    def heads(self) -> int:
        return self.length.shape[0]

    @property
    def in_few_bits(self) -> bool:
        return self.newest_keys is not None

    @property
    def is_packed(self) -> bool:
        return self.keys.ndim == 2

    @property
    def capacities(self) -> list[int]:
        """Of each head."""
        return self.measured[:, 3].tolist() if self.is_packed else [self.keys.shape[1]] * self.heads

    @property
    def capacity(self) -> int:
        return max(self.capacities)

    def compress(self, queries: Tensor | None, budget: int | list[int], positions: Tensor | None = None) -> None:
        """Brings each head to `budget` slots after a prompt.

        `queries` [heads, group, count, dim] are the prompt's own, which are observed first; with positions those
        that `observe` has kept; or none, where it kept none.
        """
        target = [budget] if isinstance(budget, int) else budget
        ops.compress(self.policy.text, self.tensors, queries, target, positions=positions, **self.spec.options)

    def observe(self, queries: Tensor, before: int = 0) -> tuple[Tensor, Tensor]:
        """Measures a prompt on its own `queries` [heads, group, count, dim], and compresses nothing.

        Returns those that the policy plans on, moved to where it wants them, and their positions; maybe none.
        """
        return ops.observe(self.policy.text, self.tensors, queries, before=before, **self.spec.options)

    def scores(self, width: int) -> Tensor:
        """What `ops.divide` compares [heads, width]: +inf for what is kept whatever its score, -inf for no slot."""
        own = self
        if not self.keys.is_cpu:  # no score reads rows; kernels measure all slots, and note it nowhere
            unread = [torch.empty(x.shape, dtype=x.dtype) for x in (self.keys, self.values)]
            own = Heads(self.policy, self.spec, *unread, *(x.cpu() for x in self.tensors[2:]))
            own.measured[:, 0] = own.length
        scores = ops.shared_scores(self.policy.text, own.tensors, **self.spec.options)
        room = max(width - self.capacity, 0)
        return pad(scores, (0, room), value=-math.inf)[:, :width].contiguous()

    def observe_behind(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Measures on `queries` [heads, group, count, dim] of tokens behind these, which are not taken in.

        For policies whose measure lies in columns; the tokens' keys and values are [heads, count, dim].
        """
        held = int(self.length.max())
        longer = self.moved(held + keys.shape[1])
        longer.append(keys, values)
        longer.observe(queries)
        self.columns[:, :, :held] = longer.columns[:, :, :held]
        self.measured[:, 0], self.measured[:, 1] = self.length, longer.measured[:, 1]

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        target: list[int],
        trigger: list[int] = (),
        heads: list[int] | None = None,
    ) -> Tensor:
        """A decode step: q [heads, group, dim], k [heads, dim], v [heads, value dim]; its attention, in float32."""
        return ops.step(
            self.policy.text, self.tensors, q, k, v, target, trigger=trigger, heads=heads, **self.spec.options
        )

    def attend(self, q: Tensor, probabilities: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of q [heads, group, dim] float32 with log-mass: output, log-sum-exp, probabilities."""
        return ops.attend(self.policy.text, self.tensors, q, probabilities=probabilities, **self.spec.options)

    # ------------------------------------------------------------------ tensors

    def rows(self, first: int, count: int) -> Self:
        """`count` of the heads, in the same memory."""
        return Heads(self.policy, self.spec, *(x[first : first + count] for x in self.tensors))

    def chosen(self, index: Tensor) -> Self:
        """Copies of the heads of that index, in its order."""
        if self.is_packed:
            return self.padded().chosen(index).packed(self.measured[index, 3].tolist())
        return Heads(self.policy, self.spec, *(x.index_select(0, index) for x in self.tensors))

    def moved(self, capacity: int, policy: Policy | None = None) -> Self:
        """A copy with places for `capacity` tokens; with another policy, one that has measured nothing."""
        kept = int(self.length.max())
        if capacity < kept:
            raise ValueError(f"moved: expected a capacity of at least {kept} slots, got {capacity}")
        keys, values = (x.new_zeros(self.heads, capacity, x.shape[2]) for x in (self.keys, self.values))
        to = Heads.over(policy or self.policy, self.spec, keys, values)
        for name in _BY_SLOT:
            getattr(to, name)[:, :kept] = getattr(self, name)[:, :kept]
        to.length, to.seen = self.length.clone(), self.seen.clone()
        to = replace(to, **self.copied(*BESIDE))
        if policy is None:
            self._expect_movable(to)
            to.columns[:, :, :kept] = self.columns[:, :, :kept]
            to.memory, to.measured = self.memory.clone(), self.measured.clone()
        return to

    def _expect_movable(self, to: "Heads") -> None:
        """Kernels read a policy's memory as it is laid out for the capacity; the CPU knows for which it was."""
        dim = max(self.keys.shape[2], self.values.shape[2])
        floats = [x.policy.describe(dim, x.spec.group, x.capacity)["memory"] for x in (self, to)]
        if self.keys.device.type != "cpu" and floats[0] != floats[1]:
            raise RuntimeError(
                f"kvmeld: {self.policy.name} on a GPU: expected its capacity of {self.capacity} slots, "
                f"got {to.capacity}"
            )

    @staticmethod
    def joined(parts: list["Heads"]) -> "Heads":
        """All heads of parts of one shape; a policy's memory may have been laid out for each."""
        if len(parts) == 1:
            return parts[0]
        floats = max(p.memory.shape[1] for p in parts)
        wide = [replace(p, memory=pad(p.memory, (0, floats - p.memory.shape[1]))) for p in parts]
        first = parts[0]
        return Heads(first.policy, first.spec, *map(torch.cat, zip(*(p.tensors for p in wide))))

    def packed(self, capacities: list[int]) -> Self:
        """A copy with places for so many tokens of each head, and no more; on a GPU for the most of these in each."""
        wide = self.padded()
        if not self.keys.is_cpu or max(capacities) > wide.capacity:
            wide = wide.moved(max(capacities))
        if not self.keys.is_cpu:
            return wide
        places = self._places(capacities, wide.capacity)
        by_slot = {name: getattr(wide, name)[places] for name in _BY_SLOT}
        columns = wide.columns[places[:, None].expand(wide.columns.shape)]
        own = self.measured.new_tensor(capacities)[:, None]
        measured = torch.cat([wide.measured, own], 1)
        return replace(wide, **by_slot, **wide.copied(*_BY_HEAD), columns=columns, measured=measured)

    def padded(self) -> Self:
        """Of packed heads a copy with places for the longest in each."""
        if not self.is_packed:
            return self
        capacities, most = self.capacities, self.capacity
        keys, values = (x.new_zeros(self.heads, most, x.shape[1]) for x in (self.keys, self.values))
        to = Heads.over(self.policy, self.spec, keys, values)
        places = self._places(capacities, most)
        for name in _BY_SLOT:
            getattr(to, name)[places] = getattr(self, name)
        to.columns[places[:, None].expand(to.columns.shape)] = self.columns
        return replace(to, **self.copied(*_BY_HEAD), measured=self.measured[:, :3].contiguous())

    def copied(self, *names: str) -> dict[str, Tensor]:
        return {name: x.clone() for name in names if (x := getattr(self, name)) is not None}

    def held_as(self, rows: str) -> Self:
        """A copy, not packed, whose rows are held as make_storage says: numbers, or on the CPU few bits."""
        wide = self.padded()
        if rows in NUMBERS and not self.in_few_bits:
            return replace(wide, keys=wide.keys.to(NUMBERS[rows]), values=wide.values.to(NUMBERS[rows]))
        beside = (self.newest_keys, self.newest_values) if self.in_few_bits else (self.keys, self.values)
        dims = [x.shape[-1] for x in beside]
        *sizes, in_half, means = ops.row_sizes(rows, *dims)

        def new(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(self.heads, *shape, dtype=dtype)

        few = dict.fromkeys(BESIDE)
        if rows not in NUMBERS:
            few = dict(zip(BESIDE, (*(new(in_half, dim) for dim in dims), new(means), new(dtype=torch.int32))))
        dtype, width = (NUMBERS[rows], dims) if rows in NUMBERS else (torch.uint8, sizes)
        keys, values = (new(wide.capacity, n, dtype=dtype) for n in width)
        own = wide.copied("log_mass", "position", "columns", "memory", "measured")
        lengths = {"length": torch.zeros_like(wide.length), "seen": torch.zeros_like(wide.seen)}
        to = replace(wide, keys=keys, values=values, **own, **lengths, **few)
        ops.convert(to.tensors, wide.tensors, **self.spec.options)
        return to

    def _places(self, capacities: list[int], most: int) -> Tensor:
        """Which of `most` places [heads, most] each head has."""
        return torch.arange(most, device=self.keys.device) < self.length.new_tensor(capacities)[:, None]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Appends tokens [heads, tokens, dim] to every head, at its next positions."""
        tokens = keys.shape[1]
        if tokens == 0:
            return
        if self.in_few_bits:
            raise ValueError("append: expected rows in numbers (held_as), got rows in few bits")
        if int(self.length.max()) + tokens > self.capacity:
            needed = int(self.length.max()) + tokens
            raise ValueError(f"append: expected a capacity of at least {needed} slots, got {self.capacity}")
        steps = torch.arange(tokens, device=keys.device)
        slot = self.length[:, None].long() + steps
        head = torch.arange(self.heads, device=keys.device)[:, None].expand_as(slot)
        self.keys[head, slot], self.values[head, slot] = keys, values
        self.log_mass[head, slot] = 0.0
        self.position[head, slot] = (self.seen[:, None] + steps).int()
        self.columns.transpose(1, 2)[head, slot] = self.policy.initial(self.columns)[:, 0]
        self.length += tokens
        self.seen += tokens

    def nbytes(self) -> int:
        """Of all tensors, places without a token included."""
        return sum(t.nbytes for t in self.tensors)

    def state_nbytes(self) -> int:
        """Of these, what the policy measures and remembers."""
        return sum(t.nbytes for t in (self.columns, self.memory, self.measured))
