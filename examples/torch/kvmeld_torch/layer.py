# SPDX-License-Identifier: MIT
"""One layer of a kvmeld_torch.Cache: its prompts, its decode steps."""

import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from . import ranks, rotation
from ._library import ops
from .attention import Own, expect_causal, later_prompt
from .heads import BESIDE, NUMBERS, Heads, Policy
from .in_bytes import Head
from .spec import Spec
from .tokens import Prompt, Tokens

_OWN_MASS = "ems"  # whose slots share entries: SDPA cannot attend over them, and its table does not grow
_GROWTH = 256  # slots that a share of such a policy may grow by
_LEAST_SLACK = 8  # places of a head that its next tokens fill before memory is allocated again ...
_SLACK = 16  # ... or so much of the mean length that this is a 16th


@dataclass
class Decoding:
    """What each sequence of a layer decodes with."""

    policies: list[Policy]
    made_for: list[int]  # slots of a head that the policy's text was made for
    seen: list[int]  # tokens
    slots: list[int]  # of a head, on average where heads share them
    target: list[int]  # slots of each head
    trigger: list[int]  # of each head; none: nothing is evicted
    places: list[int] = field(default_factory=list)  # of each head
    room: int = 0  # where nothing is evicted: steps that find a free place in every head

    def chosen(self, sequences: list[int]) -> Self:
        """Of these sequences, whose heads lie side by side."""
        each = len(self.target) // len(self.seen)
        heads = [b * each + h for b in sequences for h in range(each)]
        by_head = [[x[h] for h in heads] if x else [] for x in (self.target, self.trigger, self.places)]
        by_sequence = [[x[b] for b in sequences] for x in (self.policies, self.made_for, self.seen, self.slots)]
        return Decoding(*by_sequence, *by_head, self.room)


def _name(dtype: torch.dtype) -> str:
    return next(name for name, x in NUMBERS.items() if x == dtype)


@lru_cache
def _within(policy: str, slots: int) -> list[int]:
    return ops.budget_within(policy, slots)


class Layer(CacheLayerMixin):
    """One layer's KV heads of all sequences: heads `[batch * KV heads]`, each of its own length."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: "Cache", rotates: rotation.Rotation):
        super().__init__()
        self.cache, self.rotates = cache, rotates
        self.tokens = 0  # with padding, as the model counts
        self._heads: Heads | None = None
        self.decoding: Decoding | None = None
        self._waiting = False  # for the attention of the tokens that came last
        self.pending: list[Prompt] = []  # sequences whose prompt may go on, or is to be read a second time
        self._answered = False  # a token was decoded after the prompt
        self.reading_again = False
        self._draft: tuple[Heads, Decoding, list[Tokens]] | None = None  # what was before it, and its tokens

    @property
    def held(self) -> Heads | None:
        """All sequences, within their budgets: prompts that have been read end here. None: none has been read."""
        if self.pending and not self.cache.replay:
            end_prompt(self.cache.compressed if self.cache.shared else [self])
        return self._heads

    @property
    def heads(self) -> Heads | None:
        """The same as [heads, capacity, ...] with rows in the model's dtype, for a reader: mostly a copy."""
        return self.held.held_as(_name(self.dtype)) if self.held is not None else None

    def nbytes(self) -> int:
        """Of all tensors, with those that a draft may be taken back to, of which it may share some."""
        own = [t for x in (self.held, self._draft and self._draft[0]) if x for t in x.tensors]
        return sum({t.data_ptr(): t.nbytes for t in own}.values())

    # ------------------------------------------------------------------ what transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = value_states.dtype, value_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self._waiting:
            raise RuntimeError('kvmeld_torch.Cache: expected attn_implementation="kvmeld", got another one')
        if key_states.requires_grad:
            raise RuntimeError("kvmeld_torch.Cache: expected inference (torch.no_grad), got a gradient")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._waiting = True
        return key_states, value_states

    def get_mask_sizes(self, new: Tensor | int) -> tuple[int, int]:
        return new if isinstance(new, int) else len(new), self.tokens  # of the new tokens alone

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its older name

    def reset(self) -> None:
        self.tokens, self._heads, self._waiting, self.pending, self._draft = 0, None, False, [], None

    @property
    def least_tokens(self) -> int:
        """That `crop` can leave."""
        return self.tokens - (len(self._draft[2]) if self._draft else 0)

    def crop(self, max_length: int) -> None:
        """The tokens of the draft beyond `max_length` of all were never there. Refused: by the cache."""
        if max_length < self.tokens:
            self._heads, self.decoding, steps = self._draft
            for step in steps[: max_length - self.tokens]:
                self._step(step)
            self.tokens = max_length
        self._draft = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.held is not None:
            self.batch_select_indices(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.held is None:
            return
        self._draft = None
        each = self.held.heads // self.batch
        index = (indices.to(self.device)[:, None] * each + torch.arange(each, device=self.device)).flatten()
        self._heads, self.batch = self.held.chosen(index), len(indices)
        self.decoding = self.decoding.chosen(indices.tolist())
        self._heads.policy = self.decoding.policies[0]

    # ------------------------------------------------------------------ what the attention calls

    def attend(self, own: Own, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of the new tokens `[batch, tokens, heads, dim]`, which are taken in."""
        self._waiting, self._draft = False, None
        batch, kv_heads, tokens, _ = key.shape
        # Which are no padding; the last token sees all that are there.
        real = None if mask is None else mask[:, 0, -1, -tokens:].expand(batch, tokens)
        if mask is not None and mask.dtype != torch.bool:
            raise RuntimeError(f"kvmeld: expected a mask [batch, tokens] or of booleans, got {mask.dtype}")
        if mask is not None:
            expect_causal(mask[:, 0, :, -tokens:], real)
        new = Tokens(query.to(value.dtype), key.to(value.dtype), value, real)  # autocast rotates in float32
        if self.pending and self.cache.replay:
            return self._read_again(own, new)
        if self._heads is None and not self.pending:
            if real is not None and not real.any(1).all():
                raise RuntimeError("kvmeld: expected a token of every sequence, got a row of padding alone")
            self.spec = self._spec(own, query.shape[1] // kv_heads)
            own.expect(self.spec, query, key, value)
            of_model = max(getattr(own.module.config, "num_key_value_heads", None) or kv_heads, kv_heads)
            self.batch, self.sharded = batch, kv_heads < of_model
            self.head = self._head(key, value, of_model)
            out = own(query, key, value, mask)
            self._first_prompt(new)
        elif self.cache.drafting:
            before, steps = self._copy(), new.one_by_one()
            decoding = self.decoding.chosen(list(range(batch)))
            out = torch.cat([self._step(one) for one in steps], 1)
            self._draft = before, decoding, steps
        elif tokens == 1:
            out = self._step(new)
        elif self._expect_parts() == _OWN_MASS:
            out = torch.cat([self._step(one) for one in new.one_by_one()], 1)
        else:
            out = self._later_prompt(own, new)
        self.tokens += tokens
        return out

    def _expect_parts(self) -> str:
        """The policy's name. Refused: another part of a prompt, where it compresses the first part alone."""
        name = self.cache.policy.partition(":")[0]
        if not self._answered and (self.cache.replay or name == _OWN_MASS):
            raise RuntimeError(
                f"kvmeld_torch.Cache: {name}: expected a prompt in one part, got another before a token was decoded"
            )
        return name

    def _spec(self, own: Own, group: int) -> Spec:
        cap, sinks = own.options.get("softcap"), own.options.get("s_aux")
        return Spec(
            group,
            own.scaling or 0.0,
            self.rotates.frequencies,
            self.rotates.interleaved,
            self.rotates.last,
            soft_cap=cap or 0.0,
            sinks=() if sinks is None else tuple(sinks.flatten().tolist()),
            slopes=() if own.slopes is None else tuple(own.slopes.tolist()),
        )

    def _head(self, key: Tensor, value: Tensor, heads: int) -> Head:
        """One of so many of the layer. Refused: rows in few bits on a GPU."""
        rows = self.cache.rows or _name(value.dtype)
        if rows not in NUMBERS and not key.is_cpu:
            self.cache.reset()
            raise RuntimeError(f"kvmeld_torch.Cache: rows: expected {', '.join(NUMBERS)} on a GPU, got {rows}")
        dims = key.shape[3], value.shape[3]
        return Head(*dims, self.spec.group, rows, count=heads * len(self.cache.compressed))

    def _budget(self, seen: int) -> tuple[Policy, int]:
        """The policy of a sequence that has seen so many tokens, and the slots of its heads. Refused: too few."""
        slots = self.cache.slots_for(seen, self.head)
        return Policy(self.cache.text_for(slots)), slots

    def _first_prompt(self, new: Tokens) -> None:
        """Takes each sequence where the model has its keys and values."""
        prompts = []
        for _, q, k, v in new.sequences():
            policy, slots = self._budget(k.shape[1])
            heads = Heads.over(policy, self.spec, k, v, tokens=k.shape[1])
            room = slots + (_GROWTH if policy.name == _OWN_MASS and self.cache.grows else 0)
            if room > heads.capacity:
                heads = heads.moved(room + 1, policy)
            prompts.append(Prompt(heads, slots, q, part=k.shape[1]))
        self._take(prompts, self.cache.replay and any(p.slots < int(p.heads.seen[0]) for p in prompts))

    def _take(self, prompts: list[Prompt], is_read_again: bool = False) -> None:
        """Measures the new tokens of prompts, which are compressed when no further part of them comes."""
        self.pending, self._answered = prompts, False
        for p in prompts:
            if self.cache.replay:  # nothing but a first prompt is compressed, on the queries of its second reading
                p.queries, p.has_come = None, is_read_again
            elif p.is_new:
                p.queries, p.positions = p.heads.observe(p.queries)
            p.is_new = False
        if self.cache.replay and not is_read_again:
            end_prompt([self])

    def _read_again(self, own: Own, new: Tokens) -> Tensor:
        """Attention of a part of a second reading, on whose queries the prompts' slots are measured."""
        if not self.reading_again:
            raise RuntimeError(
                "kvmeld_torch.Cache: expected `with replay(model, encode):` around a prompt of kvzip, in one part"
            )
        out = new.query.new_zeros(*new.query.shape[:3], new.value.shape[3])
        for row, p, (at, q, k, v) in zip(out, self.pending, new.sequences()):
            if k.shape[1] > 0:
                row[:, at] = later_prompt(own, p.heads, q, k, v).flatten(0, 1)
                p.heads.observe_behind(q, k, v)
        return out.transpose(1, 2).contiguous()

    def _later_prompt(self, own: Own, new: Tokens) -> Tensor:
        """A further turn, or part of a prompt: its attention over what is held and itself."""
        out = new.query.new_zeros(*new.query.shape[:3], new.value.shape[3])
        prompts = self.pending or [self._decoded(b) for b in range(self.batch)]
        for row, p, (at, q, k, v) in zip(out, prompts, new.sequences()):
            if k.shape[1] > 0:
                row[:, at] = later_prompt(own, p.heads, q, k, v).flatten(0, 1)
                self._join(p, q, k, v)
        self._take(prompts)
        return out.transpose(1, 2).contiguous()

    def _decoded(self, sequence: int) -> Prompt:
        """A sequence as it was left by decoding."""
        held, now = self.heads, self.decoding
        each = held.heads // self.batch
        own = slice(sequence * each, (sequence + 1) * each)
        heads = held.rows(own.start, each)
        heads = replace(heads.moved(heads.capacity), policy=now.policies[sequence])
        return Prompt(heads, now.slots[sequence], has_come=False, divided=[n - 1 for n in now.trigger[own]])

    def _join(self, p: Prompt, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Adds a part. What was read before it is brought to the budget and as many slots more as the longer of the
        two latest parts has tokens, so that a prompt in many parts needs no more memory.
        """
        policy, slots = self._budget(int(p.heads.seen[0]) + k.shape[1])
        most = slots + max(p.part, k.shape[1])
        if p.has_come and int(p.heads.length.max()) > most:
            p.heads.compress(p.queries, most, p.positions)
        other = policy if p.heads.policy.name != policy.name else None  # what decoded in its place
        heads = p.heads.moved(max(int(p.heads.length.max()) + k.shape[1], slots + 1), other)
        heads.policy = policy
        heads.append(k, v)
        p.heads, p.slots, p.queries, p.positions, p.divided, p.part = heads, slots, q, None, [], k.shape[1]
        p.has_come = p.is_new = True

    def settle(self) -> None:
        """All sequences in one set of tensors, with budgets for decoding."""
        about = self.pending[0].heads.policy.describe()
        decodes = about["supports_decode"] and about["evicts"]
        policy = None if about["supports_decode"] else Policy("full_cache")  # another one than the prompt's
        slots = [p.slots for p in self.pending]
        limits = [_within(p.heads.policy.text, n) for p in self.pending for n in p.divided]
        longest = max(int(p.heads.length.max()) for p in self.pending)
        joined = Heads.joined([p.heads.moved(longest, policy) for p in self.pending])
        self._heads = joined.held_as(self.cache.rows) if self.cache.rows else joined
        self.decoding = Decoding(
            policies=[policy or p.heads.policy for p in self.pending],
            made_for=slots,
            seen=[int(p.heads.seen[0]) for p in self.pending],
            slots=list(slots),
            target=[b[0] for b in limits] if decodes else [longest] * len(limits),
            trigger=[b[1] for b in limits] if decodes else [],
        )
        self.pending = []
        self._pack()

    def _pack(self) -> None:
        """Places for what each head holds before it evicts, or for what is held, and for some tokens more."""
        now, lengths = self.decoding, self._heads.length.tolist()
        now.room = max(_LEAST_SLACK, sum(lengths) // len(lengths) // _SLACK)
        if now.trigger and not self.cache.grows:
            now.room = 0
        now.places = [max(both) + now.room for both in zip(lengths, now.trigger or lengths)]
        self._heads = self._heads.packed(now.places)

    def _copy(self) -> Heads:
        """The heads as they are; where nothing is evicted in the same memory, as steps write behind what is held."""
        h = self.held
        if self.decoding.trigger:
            return Heads(h.policy, h.spec, *(x.clone() for x in h.tensors))
        return replace(h, **h.copied("length", "seen", "measured", *BESIDE))

    def _follow(self, active: list[bool]) -> None:
        """The next token of these sequences: budgets that are a share grow with it, and memory where it is full."""
        held, now = self.held, self.decoding
        each = held.heads // self.batch
        self._answered = True
        now.seen = [n + is_new for n, is_new in zip(now.seen, active)]
        if now.trigger:
            if self.cache.grows:
                self._grow(each)
            return
        if now.room == 0:
            self._pack()
        now.room -= 1

    def _grow(self, each: int) -> None:
        """Budgets that are a share, of `each` heads of a sequence."""
        now = self.decoding
        most = int(self._heads.measured[:, 2].min()) - 1 if now.policies[0].name == _OWN_MASS else sys.maxsize
        for b, slots in enumerate(self.cache.slots_for(n, self.head) for n in now.seen):
            more = min(slots - now.slots[b], most - now.slots[b])
            if more <= 0:
                continue
            now.slots[b] += more
            if now.slots[b] >= 2 * now.made_for[b]:
                now.made_for[b], now.policies[b] = now.slots[b], Policy(self.cache.text_for(now.slots[b]))
            for h in range(b * each, (b + 1) * each):
                now.target[h], now.trigger[h] = _within(now.policies[b].text, now.trigger[h] - 1 + more)
        if any(t > p for t, p in zip(now.trigger, now.places)):
            self._pack()
        self._heads.policy = now.policies[0]

    def _step(self, new: Tokens) -> Tensor:
        batch, kv_heads, _, dim = new.key.shape
        active = [True] * batch if new.real is None else new.real[:, 0].bool().tolist()
        self._follow(active)
        policies, budgets = self.decoding.policies, (self.decoding.target, self.decoding.trigger)
        q = new.query.reshape(batch * kv_heads, -1, dim).contiguous()
        k, v = new.key.reshape(-1, dim).contiguous(), new.value.reshape(-1, new.value.shape[3]).contiguous()
        if all(active) and len(set(policies)) == 1:
            out = self._heads.step(q, k, v, *budgets)
        else:  # sequences of other lengths share other numbers of slots
            out = q.new_zeros(*q.shape[:2], v.shape[1], dtype=torch.float32)
            for policy in set(policies):
                taken = [b for b in range(batch) if active[b] and policies[b] == policy]
                chosen = [b * kv_heads + h for b in taken for h in range(kv_heads)]
                if chosen:
                    rows = [x[chosen] for x in (q, k, v)]
                    own = replace(self._heads, policy=policy)
                    out[chosen] = own.step(*rows, *budgets, heads=chosen).float()
        return out.to(new.query.dtype).view(batch, 1, -1, v.shape[1])


def _divided(layers: list[Layer], prompts: list[Prompt]) -> list[list[int]]:
    """Slots of every head of each layer. On all ranks the same is known when they decide to speak to one another."""
    heads, slots = [p.heads for p in prompts], prompts[0].slots
    seen, each, first = int(heads[0].seen[0]), heads[0].heads, 0
    if not prompts[0].has_come or not layers[0].cache.shared or slots >= seen:
        return [[slots] * each for _ in prompts]
    scores = torch.stack([h.scores(seen).to(heads[0].keys.device) for h in heads])
    if layers[0].sharded:
        scores, first = ranks.all_heads(scores, layers[0].cache.group)
    chosen = torch.tensor(ops.divide(heads[0].policy.text, scores.flatten(0, 1).cpu(), slots))
    return chosen.view(len(layers), -1)[:, first : first + each].tolist()


def end_prompt(layers: list[Layer]) -> None:
    """Compresses the prompts of all sequences, each to a budget that these layers share, for decoding."""
    for prompts in zip(*(layer.pending for layer in layers)):
        for p, slots in zip(prompts, _divided(layers, list(prompts))):
            p.divided = p.divided or slots
            if p.has_come:
                p.heads.compress(p.queries, [min(n, p.heads.capacity) for n in slots], p.positions)
    for layer in layers:
        layer.settle()
