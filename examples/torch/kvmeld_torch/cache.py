# SPDX-License-Identifier: MIT
"""A transformers cache whose heads are compressed by a policy."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from ._library import ops
from . import budgets
from .attention import attach, later_prompt, own_prompt
from .heads import Heads, Policy
from .rope import rope_of

_FULL = "full_cache"
_OWN_MASS = "ems"  # whose slots share entries: SDPA cannot attend over them, and its table does not grow
_REPLAYED = "kvzip"  # whose queries are those of a second reading
_WINDOW = 32  # last queries of a prompt, whose attention divides slots over heads
_GROWTH = 256  # slots more where a head is full and nothing is evicted


def _tokens_of(real: Tensor | None, sequence: int) -> slice | Tensor:
    """Where `real` [batch, tokens] has no padding: a slice, so that nothing is copied, but for gaps behind tokens."""
    if real is None:
        return slice(None)
    at = real[sequence].nonzero().flatten()
    first = real.shape[1] - len(at)
    return slice(first, None) if len(at) == 0 or int(at[0]) == first else at


class Layer(CacheLayerMixin):
    """One layer's KV heads of all sequences: heads `[batch * KV heads]`, each of its own length."""

    is_sliding = False

    def __init__(self, policy: str, budget: float, queries: str, divide: str, group: dist.ProcessGroup | None):
        super().__init__()
        self.text, self.budget, self.queries, self.divide, self.group = policy, budget, queries, divide, group
        self.tokens = 0  # with padding, as the model counts
        self.heads: Heads | None = None
        self.target: list[int] = []  # slots a head in decode
        self.trigger: list[int] = []
        self._waiting = False  # for the attention of the tokens that came last
        self.unread: list[Heads] | None = None  # sequences that are to be read a second time, then compressed
        self.reading_again = False

    # ------------------------------------------------------------------ what transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        if self._waiting:
            raise RuntimeError('kvmeld_torch.Cache: expected attn_implementation="kvmeld", got another one')
        if key_states.requires_grad:
            raise RuntimeError("kvmeld_torch.Cache: expected inference (torch.no_grad), got a gradient")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._waiting = True
        return attach(key_states, self), value_states

    def get_mask_sizes(self, cache_position: Tensor) -> tuple[int, int]:
        return cache_position.shape[0], self.tokens  # of the new tokens alone

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.tokens, self.heads, self._waiting, self.unread = 0, None, False, None

    def crop(self, max_length: int) -> None:
        tokens = self.tokens + max_length if max_length < 0 else max_length
        if tokens < self.tokens:
            raise RuntimeError(
                f"kvmeld_torch.Cache: expected at least {self.tokens} tokens, got crop({tokens}): no assisted or "
                "contrastive decoding, as a compressed row stands for several tokens"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.heads is not None:
            self.batch_select_indices(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.heads is None:
            return
        each = self.heads.heads // self.batch
        index = (indices.to(self.device)[:, None] * each + torch.arange(each, device=self.device)).flatten()
        self.heads, self.batch = self.heads.chosen(index), len(indices)
        chosen = index.tolist()
        self.target = [self.target[i] for i in chosen]
        self.trigger = [self.trigger[i] for i in chosen]

    # ------------------------------------------------------------------ what the attention calls

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        """Attention of the new tokens `[batch, tokens, heads, dim]`, which are taken in."""
        self._waiting = False
        batch, kv_heads, tokens, dim = key.shape
        scale = scaling if scaling is not None else dim**-0.5
        # Which are no padding; the last token sees all that are there.
        real = None if mask is None else mask[:, 0, -1, -tokens:].expand(batch, tokens)
        if self.unread is not None:
            return self._read_again(query, key, value, real, scale)
        if self.heads is None:
            self.policy = Policy(self.text, rope_of(module.config, self.text))
            self.batch = batch
            self.sharded = kv_heads < (getattr(module.config, "num_key_value_heads", None) or kv_heads)
            out = own_prompt(module, query, key, value, mask, scale)
            self._first_prompt(query, key, value, real, scale)
        elif tokens == 1:
            out = self._step(query, key, value, real)
        elif self.policy.name == _OWN_MASS:
            parts = [x.split(1, -2) for x in (query, key, value)]
            masks = [None] * tokens if real is None else real.split(1, 1)
            out = torch.cat([self._step(*x) for x in zip(*parts, masks)], 1)
        else:
            out = self._later_prompt(query, key, value, real, scale)
        self.tokens += tokens
        return out

    def slots(self, seen: int) -> int:
        """The budget of a head that has seen so many tokens."""
        wanted = self.budget if self.budget > 1 else math.ceil(self.budget * seen)
        return max(int(wanted), self.policy.describe()["min_budget"])

    def _compress(self, heads: Heads, query: Tensor) -> list[int]:
        """The end of a prompt of one sequence: query [KV heads, group, tokens, dim]. Slots of each head."""
        if query.shape[2] == 0 or self.queries == "replay":  # whose first prompt alone is compressed
            return [self.slots(int(heads.seen[0]))] * heads.heads
        slots = self._divided(heads, query)
        fit = [min(n, heads.capacity) for n in slots]
        if self.queries == "foresight":
            moved, positions = heads.foresight(query)
            heads.compress(moved, fit, positions=positions)
        else:
            heads.compress(query, fit)
        return slots

    def _divided(self, heads: Heads, query: Tensor) -> list[int]:
        """Slots of each head. On all ranks the same is known when they decide to speak to one another."""
        seen = int(heads.seen[0])
        slots = self.slots(seen)
        if self.divide == "even" or slots >= seen:
            return [slots] * heads.heads
        counts = budgets.histogram(heads.column_scores(query[:, :, -_WINDOW:])[0], heads.length)
        first = 0
        if self.sharded:
            counts = budgets.all_heads(counts, self.group)
            first = dist.get_rank(self.group) * heads.heads
        floor = max(slots // 5, min(slots, self.policy.describe()["min_budget"]))
        return budgets.divide(counts, slots * counts.shape[0], floor)[first : first + heads.heads]

    def _first_prompt(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scale: float) -> None:
        """Compresses each sequence where the model has its keys and values, then moves what is left."""
        batch, kv_heads, tokens, _ = key.shape
        group = query.shape[1] // kv_heads
        sequences, slots, evicts = [], [], False
        for b in range(batch):
            at = _tokens_of(real, b)
            k, v = key[b][:, at], value[b][:, at]
            count = k.shape[1]
            heads = Heads.over(self.policy, k, v, group=group, scale=scale, tokens=count)
            if (least := self.slots(count)) > count:
                heads = heads.moved(least + 1, self.policy)
            slots.append(self._compress(heads, query[b][:, at].unflatten(0, (kv_heads, group))))
            sequences.append(heads)
            evicts = evicts or least < count
        if self.queries == "replay" and evicts:
            self.unread = sequences
        else:
            self.settle(sequences, slots)

    def _read_again(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scale: float) -> Tensor:
        """Attention of a part of a second reading, on whose queries the prompts' slots are measured."""
        if not self.reading_again:
            raise RuntimeError("kvmeld_torch.Cache: expected `with replay(model, encode):` around a prompt of kvzip")
        out = torch.zeros_like(query)
        for b, heads in enumerate(self.unread):
            at = _tokens_of(real, b)
            q, k, v = query[b][:, at].unflatten(0, (heads.heads, -1)), key[b][:, at], value[b][:, at]
            if k.shape[1] > 0:
                out[b][:, at] = later_prompt(heads, q, k, v, scale).flatten(0, 1)
                heads.observe_behind(q, k, v)
        return out.transpose(1, 2).contiguous()

    def _later_prompt(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scale: float) -> Tensor:
        """A further turn: its attention over slots and itself, then a compression of all."""
        batch, kv_heads, tokens, _ = key.shape
        group = query.shape[1] // kv_heads
        out = torch.zeros_like(query)
        sequences, slots = [], []
        for b in range(batch):
            at = _tokens_of(real, b)
            heads = self.heads.rows(b * kv_heads, kv_heads)
            q, k, v = query[b][:, at].unflatten(0, (kv_heads, group)), key[b][:, at], value[b][:, at]
            out[b][:, at] = later_prompt(heads, q, k, v, scale).flatten(0, 1)
            policy = self.policy if heads.policy != self.policy else None  # what decoded in its place
            count, seen = k.shape[1], int(heads.seen[0]) + k.shape[1]
            heads = heads.moved(max(int(heads.length.max()) + count, self.slots(seen) + 1), policy)
            heads.append(k, v)
            slots.append(self._compress(heads, q))
            sequences.append(heads)
        self.settle(sequences, slots)
        return out.transpose(1, 2).contiguous()

    def settle(self, sequences: list[Heads], slots: list[list[int]]) -> None:
        """All sequences in one set of tensors, with budgets for decoding."""
        about = self.policy.describe()
        decodes = about["decodes"] and about["bounded"]
        policy = None if about["decodes"] else Policy(_FULL)  # another one than the prompt's
        each = [n for of_sequence in slots for n in of_sequence]
        held = max(int(s.length.max()) for s in sequences)
        capacity = max(max(each) + 1, held) if decodes else held + _GROWTH
        self.unread = None
        self.heads = Heads.joined([s.moved(capacity, policy) for s in sequences])
        if decodes:
            limits = [ops.budget_within(self.text, n) for n in each]
            self.target, self.trigger = [b[0] for b in limits], [b[1] for b in limits]
        else:
            self.target, self.trigger = [capacity] * len(each), []

    def _step(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None) -> Tensor:
        batch, kv_heads, _, dim = key.shape
        if not self.trigger and int(self.heads.length.max()) == self.heads.capacity:
            self.heads = self.heads.moved(self.heads.capacity * 5 // 4 + _GROWTH)
        active = None if real is None else real[:, 0].repeat_interleave(kv_heads)
        q = query.reshape(batch * kv_heads, -1, dim)
        k, v = key.reshape(-1, dim), value.reshape(-1, dim)
        if active is None or bool(active.all()):
            out = self.heads.step(q, k, v, self.target, self.trigger)
        else:
            chosen = active.nonzero().flatten()
            out = torch.zeros_like(q, dtype=torch.float32)
            out[chosen] = self.heads.step(
                q[chosen], k[chosen], v[chosen], self.target, self.trigger, heads=chosen.tolist()
            )
        return out.to(query.dtype).view(batch, 1, -1, dim)


class Cache(TransformersCache):
    """`model.generate(..., past_key_values=Cache("fold", budget=0.1))`, attn_implementation="kvmeld".

    policy: as kvmeld::make_policy reads it, "snapkv:window=16". budget: up to 1 the share of the tokens
    seen that a head keeps, above 1 its slots. queries: what a prompt is measured on, "own", "foresight"
    or, for kvzip, "replay"; by default what the policy is made for. divide: "even", or "scores", by which a
    layer's heads get more or fewer slots, with "replay" all heads of all layers, and then the default;
    ranks of `group` that share a model divide as one process does.
    """

    def __init__(
        self,
        policy: str = "fold",
        budget: float = 0.1,
        queries: str | None = None,
        divide: str | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        name = policy.partition(":")[0]
        Policy(policy).describe()  # refuses what is none
        if not budget > 0 or (budget > 1 and budget != int(budget)):
            raise ValueError(f"Cache: expected a budget of a share up to 1 or of whole slots, got {budget}")
        queries = queries or {"fold": "foresight", _REPLAYED: "replay"}.get(name, "own")
        expected = ("own", "foresight", "replay") if name == _REPLAYED else ("own", "foresight")
        if queries not in expected:
            raise ValueError(f"Cache: expected queries {' or '.join(expected)} of {name}, got {queries}")
        divide = divide or ("scores" if queries == "replay" else "even")
        if divide not in ("even", "scores"):
            raise ValueError(f"Cache: expected divide even or scores, got {divide}")
        super().__init__(layer_class_to_replicate=lambda: Layer(policy, budget, queries, divide, group))

    def slot_nbytes(self) -> int:
        """Of slots in use, all layers."""
        return sum(layer.heads.slot_nbytes() for layer in self.layers if layer.heads is not None)

    def state_nbytes(self) -> int:
        """Of the policy's state, all layers."""
        return sum(layer.heads.state_nbytes() for layer in self.layers if layer.heads is not None)

    def nbytes(self) -> int:
        """Of both."""
        return self.slot_nbytes() + self.state_nbytes()
