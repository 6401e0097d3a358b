# SPDX-License-Identifier: MIT
"""attn_implementation="kvmeld": prompts by the model's own attention, decode steps by kvmeld's operator."""

import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from . import rotation
from .heads import Heads, Policy
from .spec import Spec

_BLOCK = 128  # queries of a prompt at a time, where their logits are all in memory

_CHOOSE_A_CLASS = ("diffllama", "falcon", "gpt_neo", "gptj", "nemotron")

_HIDDEN = -6e4  # added to a logit that does not count, in any dtype


class _Handed(threading.local):
    """Of each thread: `torch.compile` has guards for these, and none for a ContextVar."""

    def __init__(self):
        # Keys that a module has just handed to a cache, the cache's layer, and the module's. (It may pass on others.)
        self.over: tuple[ref[Tensor], Any, int] | None = None


_handed = _Handed()
_by_sdpa: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@assume_constant_result
def has_interface(code: str) -> bool:
    """Does a model's module call what attn_implementation names? (Some compute attention in the layer itself.)"""
    return hasattr(sys.modules.get(code), "eager_attention_forward")


def attach(keys: Tensor, layer: Any, index: int) -> None:
    """Tells the attention that follows, of that layer, whose cache its new rows are for."""
    _handed.over = ref(keys), layer, index


def _attached(module: nn.Module) -> Any:
    if _handed.over is None:
        return None
    keys, layer, index = _handed.over
    _handed.over = None
    return layer if keys() is not None and index == getattr(module, "layer_idx", None) else None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options,
) -> tuple[Tensor, None]:
    """The model's own attention, and for a kvmeld_torch.Cache what its layer does with the new tokens.

    query [batch, heads, tokens, dim], key and value [batch, KV heads, tokens, dim] of the new tokens.
    """
    out = rotation.noted(module, query, key, value)
    if out is not None:
        return out, None
    layer = _attached(module)
    told = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if told is None else told
    if layer is None and not causal:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    own = Own(module, scaling, options)
    if layer is None:  # no cache, or another one: attention as it is
        return own(query, key, value, attention_mask, dropout), None
    if dropout:
        raise RuntimeError(f"kvmeld: expected no dropout, got {dropout}: call model.eval()")
    if not causal:
        raise RuntimeError("kvmeld: expected causal attention")
    if options.get("sliding_window") is not None:
        raise RuntimeError(
            f"kvmeld: {type(module).__name__}: expected a configuration that says which layers have a window, got a "
            f"layer of full attention with sliding_window={options['sliding_window']}"
        )
    return layer.attend(own, query, key, value, attention_mask), None


class Own:
    """A layer's own attention: SDPA where it gives what the model's eager function does, else that function."""

    def __init__(self, module: nn.Module, scaling: float | None, options: dict):
        self.module, self.scaling, self.options = module, scaling, options
        self.slopes: Tensor | None = options.get("slopes")

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """[batch, tokens, heads, value dim] of the last `tokens` of the keys, causally where no mask is given.

        A mask of numbers is all that is added to logits, ALiBi's too.
        """
        if self.slopes is None and self.by_sdpa(query, key, value):
            return sdpa_attention_forward(self.module, query, key, value, mask, dropout, self.scaling)[0]
        return self.eager(query, key, value, mask, dropout)

    def eager(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        by_layer = sys.modules[type(self.module).__module__]
        function = sdpa_attention_forward if self.slopes is not None else by_layer.eager_attention_forward
        scale = self.scaling if self.scaling is not None else query.shape[3] ** -0.5
        options = self.options | {"dropout": dropout, "scaling": scale}
        tokens, keys = query.shape[2], key.shape[2]
        out = []
        for first in range(0, tokens, _BLOCK):
            last = min(first + _BLOCK, tokens)
            rows = torch.arange(first, last, device=query.device)
            seen = keys if mask is not None else last + keys - tokens
            added = self._added(mask, rows, keys - tokens, seen).to(query.dtype)
            k, v = key[:, :, :seen], value[:, :, :seen]
            out.append(function(self.module, query[:, :, rows], k, v, added, **options)[0])
        return torch.cat(out, 1)

    def _added(self, mask: Tensor | None, rows: Tensor, before: int, seen: int) -> Tensor:
        """What is added to logits of the queries at `rows` [batch, 1 or heads, rows, seen]."""
        part = mask[:, :, rows] if mask is not None else _causal(rows + before, seen)
        if part.dtype != torch.bool:
            return part
        added = torch.zeros(part.shape, device=part.device).masked_fill_(~part, _HIDDEN)
        if self.slopes is not None:
            real = torch.ones_like(part[:, 0, -1:]) if mask is None else mask[:, 0, -1:]
            position = real.cumsum(-1)[:, None]
            distance = (position - position[..., rows + before].transpose(2, 3)).clamp(max=0)
            added = added + self.slopes[:, None, None] * distance
        return added

    def by_sdpa(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Does SDPA compute this layer's attention? It knows no sinks; all else is measured once, on random rows."""
        if self.slopes is not None:
            return True
        if self.options.get("s_aux") is not None:
            return False
        options = {name: x for name, x in self.options.items() if isinstance(x, (bool, int, float, str))}
        shapes = [(x.shape[1], x.shape[3]) for x in (query, key, value)]
        return _sdpa_computes(self.module, self.scaling, options, shapes, query.device)

    def expect(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuses a layer whose attention is not what the operators compute by `spec`: random rows are tried."""
        shapes = [(x.shape[1], x.shape[3]) for x in (query, key, value)]
        for q, k, v in _random_rows(shapes, query.device, self.scaling):
            heads = Heads.over(Policy("full_cache"), spec, k[0], v[0], tokens=k.shape[2])
            mine = heads.attend(q[0, :, -1].unflatten(0, (k.shape[1], -1)).contiguous())[0].flatten()
            with unrounded(query.device):
                own = self.eager(q, k, v)[0, -1].flatten()
            worst = int((mine - own).abs().argmax())
            if not (mine - own)[worst].abs() <= _ROUNDING:
                raise RuntimeError(
                    f"kvmeld: {type(self.module).__name__}: expected the outputs of its own attention, such as "
                    f"{own[worst]:.5g}, got {mine[worst]:.5g}"
                )


def unrounded(device: torch.device) -> torch.autocast:
    """Without the rounding of `torch.autocast`, if that is on: for what is measured, not for a model's own numbers."""
    return torch.autocast(device.type, enabled=False)


@assume_constant_result
def _sdpa_computes(
    module: nn.Module, scaling: float | None, options: dict, shapes: list[tuple[int, int]], device: torch.device
) -> bool:
    found = _by_sdpa.get(module)
    if found is None:
        own = Own(module, scaling, options)
        with unrounded(device), torch.no_grad():
            off = [
                (sdpa_attention_forward(module, *x, None, 0.0, scaling)[0] - own.eager(*x)).abs().max()
                for x in _random_rows(shapes, device, scaling)
            ]
        found = _by_sdpa[module] = bool(max(off) < _ROUNDING)
    return found


_ROUNDING = 1e-3  # of outputs of random rows of size 1, in float32 or a kernel's precision


def _random_rows(
    shapes: list[tuple[int, int]], device: torch.device, scaling: float | None
) -> Iterator[list[Tensor]]:
    """Queries, keys and values, of `shapes` (heads, dim) and some tokens, in float32: with logits as large as models
    cap, and with ones that a sink outweighs."""
    dim = shapes[0][1]
    scale = scaling if scaling is not None else dim**-0.5
    draw = torch.Generator().manual_seed(37)
    for size in (8.0, 0.5):
        rows = [torch.randn(1, heads, 12, dim, generator=draw).to(device) for heads, dim in shapes]
        rows[0] *= size / (scale * dim**0.5)
        yield rows


def _causal(rows: Tensor, keys: int) -> Tensor:
    """A mask of the queries at `rows` over `keys` [1, 1, rows, keys]."""
    return (torch.arange(keys, device=rows.device) <= rows[:, None])[None, None]


def expect_causal(mask: Tensor, real: Tensor) -> None:
    """Refuses a mask `[batch, tokens, tokens]` that hides more than later tokens and padding: a window, or chunks.

    real [batch, tokens]: which are no padding.
    """
    tokens = mask.shape[-1]
    # A token that is none but sees itself is hidden from the last. (Rows of padding may be given everything to see.)
    hidden = mask.diagonal(dim1=1, dim2=2) & ~mask.all(-1) & ~real
    other = bool(hidden.any())
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
    for rows in torch.arange(tokens, device=mask.device).split(256):  # of a long prompt, some at a time
        wanted = causal[rows] & real[:, None]
        other = other or bool(((mask[:, rows] != wanted) & real[:, rows, None]).any())
    if other:
        raise RuntimeError("kvmeld: expected a mask of causal attention and padding, got another (a window, or chunks)")


def later_prompt(own: Own, heads: Heads, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of tokens over the slots of `heads` and causally over themselves.

    query [KV heads, group, tokens, dim], key and value [KV heads, tokens, dim]; the result is as query.
    """
    count, group, tokens, _ = query.shape
    slots = int(heads.length.max())
    keys = torch.cat([heads.keys[:, :slots], key], 1)
    values = torch.cat([heads.values[:, :slots], value], 1)
    held = torch.arange(slots, device=key.device) < heads.length[:, None]
    mass = heads.log_mass[:, :slots].masked_fill(~held, _HIDDEN).to(query.dtype)
    out = torch.empty(*query.shape[:3], values.shape[-1], dtype=query.dtype, device=query.device)
    by_sdpa = own.by_sdpa(query.flatten(0, 1)[None], key[None], value[None])
    for rows in torch.arange(tokens, device=key.device).split(_BLOCK):
        causal = torch.zeros(len(rows), tokens, dtype=query.dtype, device=key.device)
        causal.masked_fill_(~_causal(rows, tokens)[0, 0], _HIDDEN)
        bias = [mass[:, None].expand(-1, len(rows), -1), causal.expand(count, -1, -1)]
        bias = torch.cat(bias, 2)[:, None].expand(-1, group, -1, -1)
        if own.slopes is not None:
            after = heads.seen[:, None] + torch.arange(tokens, device=key.device)
            position = torch.cat([heads.position[:, :slots], after], 1)[:, None, None]
            distance = (position - after[:, None, rows, None]).clamp(max=0)
            bias = bias + (own.slopes.view(count, group, 1, 1) * distance).to(bias.dtype)
        if by_sdpa:
            k, v = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
            out[:, :, rows] = nn.functional.scaled_dot_product_attention(
                query[:, :, rows], k, v, attn_mask=bias, scale=own.scaling
            )
        else:
            whole = own.eager(query[:, :, rows].flatten(0, 1)[None], keys[None], values[None], bias.flatten(0, 1)[None])
            out[:, :, rows] = whole[0].transpose(0, 1).unflatten(0, (count, group))
    return out


def _mask(*, config: PreTrainedConfig, **given) -> Tensor | None:
    """What the attention of that configuration's model takes: SDPA's, or numbers for one without the interface."""
    code = type(config).__module__.replace("configuration_", "modeling_")
    return (sdpa_mask if has_interface(code) else eager_mask)(config=config, **given)


def _by_class() -> None:
    """Models that choose a class by the attention's name get their eager one, which a Cache refuses in words."""
    for name in _CHOOSE_A_CLASS:
        code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        classes = getattr(code, f"{name.upper()}_ATTENTION_CLASSES", {})  # none in later versions
        if "eager" in classes:
            classes.setdefault("kvmeld", classes["eager"])


_by_class()
AttentionInterface.register("kvmeld", attention)
AttentionMaskInterface.register("kvmeld", _mask)
