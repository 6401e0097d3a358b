# SPDX-License-Identifier: MIT
"""attn_implementation="kvmeld": prompts by SDPA, decode steps by kvmeld's operator."""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .heads import Heads

_BLOCK = 256  # queries of a later prompt at a time: their logits are all in memory

_OWNER = "_kvmeld_layer"  # of a key tensor: the cache layer that it came through


def attach(keys: Tensor, layer) -> Tensor:
    """Tells the attention that follows which layer's cache these keys are for."""
    setattr(keys, _OWNER, layer)
    return keys


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
    """SDPA, and for a kvmeld_torch.Cache what its layer does with the new tokens.

    query [batch, heads, tokens, dim], key and value [batch, KV heads, tokens, dim] of the new tokens.
    """
    layer = getattr(key, _OWNER, None)
    if layer is None:  # no cache, or another one: attention as it is
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise RuntimeError(f"kvmeld: expected full attention, got {name} ({type(module).__name__})")
    if dropout:
        raise RuntimeError(f"kvmeld: expected no dropout, got {dropout}: call model.eval()")
    if not getattr(module, "is_causal", True):
        raise RuntimeError("kvmeld: expected causal attention")
    return layer.attend(module, query, key, value, attention_mask, scaling), None


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


def later_prompt(heads: Heads, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of tokens over the slots of `heads` and causally over themselves.

    query [KV heads, group, tokens, dim], key and value [KV heads, tokens, dim]; the result is as query.
    """
    count, group, tokens, _ = query.shape
    slots = int(heads.length.max())
    keys = torch.cat([heads.keys[:, :slots], key], 1)[:, None]
    values = torch.cat([heads.values[:, :slots], value], 1)[:, None]
    held = torch.arange(slots, device=key.device) < heads.length[:, None]
    mass = heads.log_mass[:, :slots].masked_fill(~held, float("-inf"))
    ahead = torch.arange(tokens, device=key.device)
    out = torch.empty_like(query)
    for first in range(0, tokens, _BLOCK):
        part = slice(first, min(first + _BLOCK, tokens))
        causal = torch.zeros(ahead[part].numel(), tokens, device=key.device)
        causal.masked_fill_(ahead > ahead[part, None], float("-inf"))
        bias = torch.cat(
            [mass[:, None].expand(-1, causal.shape[0], -1), causal.expand(count, -1, -1)], 2
        )[:, None].to(query.dtype)
        out[:, :, part] = nn.functional.scaled_dot_product_attention(
            query[:, :, part],
            keys.expand(-1, group, -1, -1),
            values.expand(-1, group, -1, -1),
            attn_mask=bias,
            scale=scale,
        )
    return out


AttentionInterface.register("kvmeld", attention)
AttentionMaskInterface.register("kvmeld", sdpa_mask)
