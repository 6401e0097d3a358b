# SPDX-License-Identifier: MIT
"""A layer's rotary embedding, as kvmeld's policies take it: read in its configuration, and checked against its code."""

import inspect
import sys

import torch
from torch import Tensor, nn

_TURNS = ("fold", "expected_attention", "compactor", "ems", "streaming_llm")  # policies that rotate


def rope_of(module: nn.Module, policy: str) -> tuple[float, ...]:
    """`(base,)`, with Llama 3.1's scaling `(base, factor, low, high, original context)`, `()` where nothing rotates.

    `module`: the layer's attention. Refused: rotations of other kinds, and models whose code rotates otherwise than
    their configuration says (interleaved pairs, say) or cannot be asked.
    """
    rope = getattr(module.config, "rope_parameters", None)
    if policy.partition(":")[0] not in _TURNS or not rope or not getattr(module, "use_rope", True):
        return ()
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise RuntimeError(
            f"kvmeld: {policy} rotates keys or queries: expected RoPE of type default or llama3, got {rope}"
        )
    base = float(rope.get("rope_theta", 10000.0))
    if not _rotates_halves(module, base if kind == "default" else None):
        raise RuntimeError(
            f"kvmeld: {policy} rotates keys or queries: expected RoPE that pairs the halves of a head, got that of "
            f"{type(module).__name__}"
        )
    if kind == "default":
        return (base,)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return (base, *(float(rope[name]) for name in names))


def _rotates_halves(module: nn.Module, base: float | None) -> bool:
    """Does the model's own code rotate pairs of elements `dim / 2` apart, by the powers of `base` if that is given?"""
    code = sys.modules[type(module).__module__]
    embeddings = [c for name, c in vars(code).items() if name.endswith("RotaryEmbedding") and inspect.isclass(c)]
    rotate = getattr(code, "apply_rotary_pos_emb", None)
    if len(embeddings) != 1 or rotate is None:
        return False
    position = torch.tensor([[0, 1, 7]])
    try:
        embedding = embeddings[0](config=module.config)
        x = torch.linspace(-1, 1, 6 * embedding.inv_freq.numel()).reshape(1, 1, 3, -1)
        rotated = rotate(x, x, *embedding(x, position))[0]
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):
        return False  # made or called in a way of its own
    half = torch.arange(embedding.inv_freq.numel())
    frequency = embedding.inv_freq if base is None else base ** (-half / len(half))
    return rotated.shape == x.shape and torch.allclose(rotated, _halves(x, position, frequency), atol=1e-4)


def _halves(x: Tensor, position: Tensor, frequency: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    angle = position[..., None] * frequency
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
