# SPDX-License-Identifier: MIT
"""A transformers cache whose layers with full attention are compressed by a policy."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from . import rotation
from ._library import ops
from .alibi import by_interface
from .attention import has_interface
from .layer import Layer

_REPLAYED = "kvzip"  # whose queries are those of a second reading
_SHARED = ("fold", _REPLAYED)  # best where one threshold divides the slots over the model
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


def _new(now: CacheLayerMixin, before: CacheLayerMixin) -> int:
    return now.get_seq_length() - before.get_seq_length()


class Cache(TransformersCache):
    """`model.generate(..., past_key_values=Cache("fold", budget=0.1))`, attn_implementation="kvmeld".

    policy: as kvmeld::make_policy reads it, "snapkv:window=16". budget: up to 1 the share of the tokens
    seen that a head keeps, above 1 its slots. divide: "scores", by which all heads of all layers share the slots,
    or "even"; by default what is best for the policy, but "even" for kvmerger, whose GPU kernels refuse shared slots.
    replay: whether kvzip's prompts are read twice.
    Ranks of `group` that share a model divide as one process does.
    Refused: budgets below the policy's least, shared slots of a policy without scores.
    """

    def __init__(
        self,
        policy: str = "fold",
        budget: float = 0.1,
        divide: str | None = None,
        replay: bool = True,
        group: dist.ProcessGroup | None = None,
    ):
        name = policy.partition(":")[0].partition("+")[0]  # "kvzip+massfold" is scored as kvzip
        if not budget > 0 or (budget > 1 and budget != int(budget)):
            raise ValueError(f"Cache: expected a budget of a share up to 1 or of whole slots, got {budget}")
        divide = divide or ("scores" if name in _SHARED else "even")
        if divide not in ("even", "scores"):
            raise ValueError(f"Cache: expected divide even or scores, got {divide}")
        self.policy, self.budget, self.group = policy, budget, group
        self.shared, self.replay = divide == "scores", replay and name == _REPLAYED
        self.text_for(int(budget) if budget > 1 else _MANY)
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
        model, batch = rotation.calling_model()
        known = has_interface(type(model).__module__) or by_interface(model)
        with _by_model(model):
            rotations = rotation.measured(model, tokens) if known else {}
        layers = DynamicCache(config=model.config).layers
        for i, rotates in rotations.items():
            if not layers[i].is_sliding:
                layers[i] = Layer(self, rotates)
        if not rotations:
            raise RuntimeError(
                'kvmeld_torch.Cache: expected attn_implementation="kvmeld" and attention by the interface of '
                f"transformers, got {type(model).__name__} with another one"
            )
        with _by_model(model):
            state = _own_state(model, batch)
        if self.replay and state is not None:
            raise RuntimeError(
                f"kvmeld_torch.Cache: {self.policy}: expected layers that can read a prompt a second time, "
                f"got those of {type(state).__name__} (replay=False scores by the prompt's own queries)"
            )
        self.state, self.layers = state, layers

    @property
    def compressed(self) -> list[Layer]:
        """The layers with full attention."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if state is None:
            raise AttributeError(f"kvmeld_torch.Cache: expected an attribute that it has, got {name}")
        return getattr(state, name)

    def _layer(self, index: int) -> CacheLayerMixin:
        """The layer, or where it has no attention one that has."""
        layer = self.layers[index]
        return layer if layer.is_sliding or isinstance(layer, Layer) else self.compressed[0]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any) -> tuple[Tensor, Tensor]:
        self._begin(key_states.shape[2])
        self._before_draft = self._before_draft if self.drafting else {}
        return self.layers[layer_idx].update(key_states, value_states, *more)

    def get_mask_sizes(self, cache_position: Tensor, layer_idx: int) -> tuple[int, int]:
        self._begin(cache_position.shape[0])
        seen = self.get_seq_length()
        if len(cache_position) > 1 and int(cache_position[0]) != seen:  # one token: not worth waiting for a GPU
            raise RuntimeError(
                f"kvmeld_torch.Cache: expected tokens from position {seen} on (use_cache=True), got some from "
                f"{int(cache_position[0])} on"
            )
        return self._layer(layer_idx).get_mask_sizes(cache_position)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._layer(layer_idx).get_seq_length() if self.layers else 0

    @contextmanager
    def draft(self) -> Iterator[None]:
        """Tokens of a forward pass meanwhile are decode steps, the last of which `crop` may take back.

        Refused: layers whose state cannot be taken back.
        """
        if self.state is not None:
            name = type(self.state).__name__
            raise RuntimeError(f"kvmeld_torch.Cache: draft: expected layers with attention alone, got those of {name}")
        self._before_draft = {i: copy(x) for i, x in enumerate(self.layers) if not isinstance(x, Layer)}
        self.drafting = True
        try:
            yield
        finally:
            self.drafting = False

    def crop(self, max_length: int) -> None:
        """Takes the last tokens of a draft back, all but `max_length` of all (below 0: so many), to the bit.

        Refused: tokens before the draft, which are compressed.
        """
        seen = self.get_seq_length()
        tokens = seen + max_length if max_length < 0 else max_length
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

    def slot_nbytes(self) -> int:
        """Of slots in use, all layers."""
        return sum(layer.heads.slot_nbytes() for layer in self.compressed if layer.heads is not None)

    def state_nbytes(self) -> int:
        """Of the policy's state, all layers."""
        return sum(layer.heads.state_nbytes() for layer in self.compressed if layer.heads is not None)

    def nbytes(self) -> int:
        """Of both."""
        return self.slot_nbytes() + self.state_nbytes()

    def reserved_nbytes(self) -> int:
        """Of all that is allocated for them, slots that are not in use included."""
        return sum(layer.heads.reserved_nbytes() for layer in self.compressed if layer.heads is not None)
