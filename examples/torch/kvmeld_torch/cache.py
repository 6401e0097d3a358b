# SPDX-License-Identifier: MIT
"""A transformers cache whose layers with full attention are compressed by a policy."""

import inspect
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from . import rotation
from ._library import ops
from .alibi import by_interface
from .attention import attach, has_interface
from .in_bytes import Bytes, Head
from .layer import Layer

_REPLAYED = "kvzip"  # whose queries are those of a second reading
_SHARED = ("fold", _REPLAYED)  # best where one threshold divides the slots over the model
FLOOR = 32  # slots of a head: with so few tokens nothing is evicted by a share of them
_MANY = 1_000_000  # slots: enough for any policy


def _own_state(model: PreTrainedModel, batch: int) -> Any:
    """What a model keeps of its layers without attention, where its code has a cache of its own; else nothing."""
    code = sys.modules[type(model).__module__]
    made = [c for c in vars(code).values() if inspect.isclass(c) and c.__module__ == code.__name__]
    for kind in made:
        if hasattr(kind, "get_mask_sizes"):
            known = {"dtype": model.dtype, "device": model.device, "batch_size": batch, "max_batch_size": batch}
            takes = inspect.signature(kind).parameters
            return kind(model.config, **{name: x for name, x in known.items() if name in takes})
    return None


@contextmanager
def _by_model(model: PreTrainedModel):
    """What a model's own code cannot do is refused in words; the library's refusals are words already."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as e:
        if str(e).startswith("kvmeld") or isinstance(e, torch.OutOfMemoryError):
            raise
        raise RuntimeError(
            "kvmeld_torch.Cache: expected a model that runs on rows given to its layers and makes its own cache, "
            f"got {type(model).__name__} ({type(e).__name__}: {e})"
        ) from e


def _first_position(given: dict[str, Any], tokens: int) -> int | None:
    """Where a model's caller says that the new tokens begin; None: nothing says so."""
    mask, at = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, Tensor):
        return mask.shape[1] - tokens if mask.ndim == 2 else None
    told = mask is None and isinstance(at, Tensor) and at.ndim == 2 and tokens > 1  # of one token a GPU would be awaited
    return int(at[0, -1]) + 1 - tokens if told else None


def _expect_plain(model: PreTrainedModel, layer: CacheLayerMixin) -> None:
    if type(layer) is not DynamicLayer:
        raise RuntimeError(
            f"kvmeld_torch.Cache: expected layers of which each has attention alone or a state alone, "
            f"got {type(model).__name__} with {type(layer).__name__}"
        )


def _new(now: CacheLayerMixin, before: CacheLayerMixin) -> int:
    return now.get_seq_length() - before.get_seq_length()


class Cache(TransformersCache):
    """`model.generate(..., past_key_values=Cache("fold", bytes=0.1, rows="k6v4"))`, attn_implementation="kvmeld".

    policy: as kvmeld::make_policy reads it, "snapkv:window=16". budget: up to 1 the share of the tokens seen that a
    head keeps, in decode too; above 1 its slots. bytes, in place of it, of each sequence: up to 1 (or "10%") a share
    of what the tokens seen take in 16 bits, in decode too, 1 all of these tokens; above 1 (or "64MiB") an amount. All
    that is allocated counts, but the places ahead of a share that grows. A share is never below `FLOOR` slots.
    divide: "scores", by which all heads of all layers share the slots,
    or "even"; by default what is best for the policy, but "even" for kvmerger, whose GPU kernels refuse shared slots.
    replay: whether kvzip's prompts are read twice.
    Ranks of `group` that share a model divide as one process does.
    rows: what keys and values are held as once a prompt was compressed, as kvmeld::make_storage reads it; by default
    as the model has them.
    Refused: budgets below the policy's least, shared slots of a policy without scores.
    """

    def __init__(
        self,
        policy: str = "fold",
        budget: float | None = None,
        divide: str | None = None,
        replay: bool = True,
        group: dist.ProcessGroup | None = None,
        bytes: float | str | None = None,
        rows: str | None = None,
    ):
        name = policy.partition(":")[0].partition("+")[0]  # "kvzip+massfold" is scored as kvzip
        if bytes is not None and budget is not None:
            raise ValueError(f"Cache: expected a budget or bytes, got both ({budget} and {bytes!r})")
        self.bytes = None if bytes is None else Bytes.of(bytes)
        budget = 0.1 if budget is None else budget
        if not budget > 0 or (budget > 1 and budget != int(budget)):
            raise ValueError(f"Cache: expected a budget of a share up to 1 or of whole slots, got {budget}")
        divide = divide or ("scores" if name in _SHARED else "even")
        if divide not in ("even", "scores"):
            raise ValueError(f"Cache: expected divide even or scores, got {divide}")
        self.policy, self.budget, self.group, self.rows = policy, budget, group, rows
        if rows is not None:
            ops.row_sizes(rows, 1, 1)
        self.shared, self.replay = divide == "scores", replay and name == _REPLAYED
        self.text_for(int(budget) if budget > 1 else _MANY)
        # Is the budget a share of the tokens seen?
        self.grows = self.bytes.share > 0 if self.bytes else budget <= 1
        self._floor = self._least(FLOOR if self.grows else 1) if self.grows or self.bytes else 0
        super().__init__(layers=[])
        self.state: Any = None  # of layers without attention
        self.drafting = False
        self._before_draft: dict[int, CacheLayerMixin] = {}  # transformers' own layers

    # ------------------------------------------------------------------ what transformers calls

    def _begin(self, tokens: int) -> None:
        """Takes the model that calls: layers with full attention are compressed, all others are transformers' own.

        tokens: of the first prompt. Refused: models whose rotations cannot be told.
        """
        if self.layers:
            return
        model, given = rotation.calling_model()
        rows = [given.get(name) for name in ("inputs_embeds", "input_ids")]
        batch = next((len(x) for x in rows if isinstance(x, Tensor)), 1)
        known = has_interface(type(model).__module__) or by_interface(model)
        with _by_model(model):
            layers = DynamicCache(config=model.config).layers
            if not layers:  # of some configurations that share keys and values between layers
                raise ValueError("no layers in its cache")
            full = [i for i, layer in enumerate(layers) if not getattr(layer, "is_sliding", False)]
            rotations = rotation.measured(model, tokens, full) if known and full else {}
        for i, rotates in rotations.items():
            _expect_plain(model, layers[i])
            layers[i] = Layer(self, rotates)
        if not full:
            warnings.warn(
                f"kvmeld_torch.Cache: {type(model).__name__}: nothing is compressed, as no layer has full attention",
                stacklevel=2,
            )
        elif not rotations:
            raise RuntimeError(
                'kvmeld_torch.Cache: expected attn_implementation="kvmeld" and attention by the interface of '
                f"transformers, got {type(model).__name__} with another one"
            )
        with _by_model(model):
            state = _own_state(model, batch)
        self.state, self.layers = state, layers
        if self.replay and (name := self._without_attention()):
            self.reset()
            raise RuntimeError(
                f"kvmeld_torch.Cache: {self.policy}: expected layers that can read a prompt a second time, "
                f"got those of {name} (replay=False scores by the prompt's own queries)"
            )

    def _expect_mask_first(self) -> None:
        """The layer that calls is one of those that `by_interface` replaced, and goes on as it was."""
        model = rotation.calling_model()[0]
        if not has_interface(type(model).__module__):
            self.reset()
            raise RuntimeError(
                f"kvmeld_torch.Cache: {type(model).__name__}: expected a version of transformers that asks the cache "
                f"for the mask's size before its layers (5.2 or later), got {transformers.__version__}"
            )

    @property
    def compressed(self) -> list[Layer]:
        """The layers with full attention."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _without_attention(self) -> str:
        """What holds the state of layers without attention: the model's own cache, or layers; empty where none are."""
        held = [self.state] if self.state is not None else self.layers
        return next((type(x).__name__ for x in held if not isinstance(x, CacheLayerMixin)), "")

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if state is None:
            raise AttributeError(
                "kvmeld_torch.Cache: expected a model that asks for what each of transformers' caches has, "
                f"got one that asks for {name}"
            )
        return getattr(state, name)

    def _layer(self, index: int) -> CacheLayerMixin:
        """The layer, or where it has no attention one that has."""
        layer = self.layers[index]
        return layer if getattr(layer, "is_sliding", False) or isinstance(layer, Layer) else self.compressed[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.layers:
            self._begin(key_states.shape[2])
            self._expect_mask_first()
        self._before_draft = self._before_draft if self.drafting else {}
        layer = self.layers[layer_idx]
        if isinstance(layer, Layer):
            attach(key_states, layer, layer_idx)
        return layer.update(key_states, value_states, *more, **named)

    def get_mask_sizes(self, new: Tensor | int, layer_idx: int) -> tuple[int, int]:
        """new: tokens, since transformers 5.4 their number; before their positions."""
        tokens = new if isinstance(new, int) else len(new)
        self._begin(tokens)
        seen, first = self.get_seq_length(), _first_position(rotation.calling_model()[1], tokens)
        if first is not None and first != seen:
            raise RuntimeError(
                f"kvmeld_torch.Cache: expected tokens from position {seen} on (use_cache=True), got some from "
                f"{first} on"
            )
        return self._layer(layer_idx).get_mask_sizes(new)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._layer(layer_idx).get_seq_length() if self.layers else 0

    @contextmanager
    def draft(self) -> Iterator[None]:
        """Tokens of a forward pass meanwhile are decode steps, the last of which `crop` may take back.

        Refused: layers whose state cannot be taken back.
        """
        if name := self._without_attention():
            raise RuntimeError(f"kvmeld_torch.Cache: draft: expected layers with attention alone, got those of {name}")
        self._before_draft = {i: copy(x) for i, x in enumerate(self.layers) if not isinstance(x, Layer)}
        self.drafting = True
        try:
            yield
        finally:
            self.drafting = False

    def activate_past_recording(self) -> None:
        """Nothing: `draft` keeps what `crop` takes back."""

    def crop(self, max_length: int) -> None:
        """Takes the last tokens of a draft back, all but `max_length` of all (up to 0: so many), to the bit.

        Refused: tokens before the draft, which are compressed.
        """
        seen = self.get_seq_length()
        tokens = seen + max_length if max_length <= 0 else max_length
        own = [(self.layers[i], was) for i, was in self._before_draft.items() if was.is_initialized]
        # A window that is shorter than the draft has lost tokens that would count again.
        held = [(was if _new(now, was) <= now.keys.shape[2] else now).get_seq_length() for now, was in own]
        least = max([layer.least_tokens for layer in self.compressed] + held, default=seen)
        if tokens < least:
            raise RuntimeError(
                f"kvmeld_torch.Cache: crop: expected at least {least} tokens (others are taken back of a draft alone, "
                f"`with drafts(model):` around generate), got {tokens}"
            )
        for layer in self.compressed:
            layer.crop(tokens)
        for now, was in own if tokens < seen else ():
            first = now.keys.shape[2] - _new(now, was)
            kept = slice(first, first + tokens - was.get_seq_length())
            was.update(now.keys[:, :, kept], now.values[:, :, kept])
            self.layers[self.layers.index(now)] = was
        self._before_draft = {}

    def reset(self) -> None:
        self.layers, self.state = [], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._choose(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.state is not None:
            self._choose(torch.arange(self.compressed[0].batch // repeats).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._choose(indices)

    def _choose(self, sequences: Tensor) -> None:
        """Of the state of layers without attention, lists of tensors [batch, ...], those of these sequences."""
        for name, x in vars(self.state).items() if self.state is not None else ():
            if isinstance(x, list):
                setattr(self.state, name, [self._chosen(t, sequences) for t in x])

    @staticmethod
    def _chosen(x: Any, sequences: Tensor) -> Any:
        return x.index_select(0, sequences.to(x.device)) if isinstance(x, Tensor) and x.ndim > 1 else x

    # ------------------------------------------------------------------ what it holds

    def text_for(self, slots: int) -> str:
        """The policy for heads of so many slots. Refused: too few."""
        text = f"{self.policy}/{slots}" if self.shared else self.policy
        ops.budget_within(text, slots)
        return text

    def _least(self, slots: int) -> int:
        """So many, or more where the policy needs them."""
        for slots in range(slots, _MANY):
            try:
                self.text_for(slots)
            except RuntimeError:
                continue
            return slots
        return _MANY

    def slots_for(self, seen: int, head: Head | None = None) -> int:
        """Of a head (on average, where heads share them), when so many tokens were seen. Refused: an amount of bytes
        that is too small.
        """
        if self.bytes is None:
            return max(math.ceil(self.budget * seen), self._floor) if self.grows else int(self.budget)
        if self.bytes.share == 1:
            return max(seen, self._floor)
        policy = self.text_for(_MANY)
        slots = self.bytes.slots(seen, head, policy)
        if self.grows:
            return max(min(slots, seen), self._floor)
        if slots < self._floor:
            self.reset()
            raise RuntimeError(
                f"kvmeld_torch.Cache: bytes: expected at least {self.bytes.least(self._floor, head, policy, seen)} "
                f"({self._floor} slots in each of {head.count} heads, with what {self.policy} keeps), "
                f"got {self.bytes.amount}"
            )
        return slots

    def slots(self) -> list[int]:
        """Of a head of each sequence that the budget has come to, on average where heads share them."""
        self.compress()
        return list(self.compressed[0].decoding.slots) if self.compressed else []

    def compress(self) -> None:
        """Ends the prompt now, not when its first token is decoded: a further part finds it compressed."""
        for layer in self.compressed:
            _ = layer.held

    def nbytes(self) -> int:
        """Of all that is allocated for the layers with full attention."""
        return sum(layer.nbytes() for layer in self.compressed)

    def state_nbytes(self) -> int:
        """Of these, what the policy measures and remembers."""
        return sum(layer.held.state_nbytes() for layer in self.compressed if layer.held is not None)
