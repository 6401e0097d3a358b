# SPDX-License-Identifier: MIT
"""BLOOM and MPT compute attention in the layer itself: the same by the interface that other models have."""

import sys
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ._versions import cache_of
from .attention import attention

_TOKENS = 12
_ROUNDING = 1e-3  # of outputs, as a share of the largest


def _bloom(self: nn.Module, hidden_states: Tensor, residual: Tensor, attention_mask: Tensor, layer_past=None, **_):
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    seen = None if attention_mask is None else attention_mask == 0
    out = attention(self, query, key, value, seen, scaling=self.inv_norm_factor, slopes=self.slopes)[0]
    return residual + self.dense(out.flatten(2)), None


def _mpt(self: nn.Module, hidden_states: Tensor, attention_mask: Tensor, **given):
    mixed = self.Wqkv(hidden_states)
    mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else mixed
    query, key, value = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, 2))
    cache = cache_of(given)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    seen = None if attention_mask is None else ~attention_mask
    out = attention(self, query, key, value, seen, scaling=self.softmax_scale, slopes=self.slopes)[0]
    return self.out_proj(out.flatten(2)), None


def by_interface(model: PreTrainedModel) -> bool:
    """Makes BLOOM's and MPT's layers use the interface. False: another model. Refused: other outputs than before."""
    code = sys.modules[type(model).__module__]
    seen = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()[None, None]
    if hasattr(code, "BloomAttention"):
        kind, forward = code.BloomAttention, _bloom
        bias = code.build_alibi_tensor(seen[0, 0, -1:].float(), model.num_heads, torch.float32)
        hidden = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, torch.finfo(torch.float32).min)
        given = {"residual": torch.zeros(()), "alibi": bias, "attention_mask": hidden}
    elif hasattr(code, "MptAttention"):
        kind, forward = code.MptAttention, _mpt
        bias = code.build_mpt_alibi_tensor(model.config.n_heads, _TOKENS)
        given = {"position_bias": bias, "attention_mask": ~seen}
    else:
        return False
    for layer in (m for m in model.modules() if isinstance(m, kind)):
        layer.config, layer.slopes = model.config, (bias[:, 0, 1] - bias[:, 0, 0]).to(model.device)
        draw = torch.Generator().manual_seed(37)
        x = torch.randn(1, _TOKENS, model.config.hidden_size, generator=draw).to(model.device, model.dtype)
        own, mine = (f(layer, x, **_on(model, given))[0].float() for f in (kind.forward, forward))
        off, size = float((own - mine).abs().max()), float(own.abs().max())
        if not off <= _ROUNDING * size:
            raise RuntimeError(
                f"kvmeld: {kind.__name__}: expected its own outputs (up to {size:.3g}), "
                f"got some that differ by {off:.3g}"
            )
        layer.forward = partial(forward, layer)
    return True


def _on(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: x.to(model.device, model.dtype if x.is_floating_point() else None) for k, x in given.items()}
