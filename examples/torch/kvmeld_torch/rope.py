# SPDX-License-Identifier: MIT
"""A model's rotary embedding, as kvmeld's policies take it."""

from transformers import PreTrainedConfig

_TURNS = ("fold", "expected_attention", "compactor", "ems", "streaming_llm")  # policies that rotate


def rope_of(config: PreTrainedConfig, policy: str) -> tuple[float, ...]:
    """`(base,)`, or with Llama 3.1's scaling `(base, factor, low, high, original context)`."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if policy.partition(":")[0] not in _TURNS:
        return ()
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise RuntimeError(
            f"kvmeld: {policy} rotates keys or queries: expected RoPE of type default or llama3, got {rope}"
        )
    base = float(rope.get("rope_theta", 10000.0))
    if kind == "default":
        return (base,)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return (base, *(float(rope[name]) for name in names))
