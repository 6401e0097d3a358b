# SPDX-License-Identifier: MIT
"""A prompt in PyTorch: causal attention, H2O's column sums, and kvpress's presses on the same keys, values and queries."""

from types import SimpleNamespace

import kvpress
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HEADS, KV_HEADS, DIM = 32, 8, 128


class Prompt:
    """What a press is given by its model. `projected`: presses get hidden states and have to project the queries that they look
    at once more, as kvpress does in a model; otherwise the queries are at hand, as an engine has them."""

    def __init__(self, tokens, dtype=torch.float32):
        torch.manual_seed(0)
        self.tokens = tokens
        self.queries = torch.randn(1, tokens, HEADS * DIM, dtype=dtype)
        self.q = self.queries.view(1, tokens, HEADS, DIM).transpose(1, 2)
        self.k, self.v = torch.randn(2, 1, KV_HEADS, tokens, DIM, dtype=dtype).unbind(0)
        # Repeated beforehand: with enable_gqa PyTorch 2.6 leaves its fast path, which costs it many times as much.
        self.repeated = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (self.k, self.v)]
        self.config = LlamaConfig(
            hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM
        )
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.rope = self.rotary(self.k, torch.arange(tokens).unsqueeze(0))
        self.project = torch.nn.Linear(HEADS * DIM, HEADS * DIM, bias=False, dtype=dtype)

    def module(self, projected):
        return SimpleNamespace(
            config=self.config,
            head_dim=DIM,
            num_key_value_groups=HEADS // KV_HEADS,
            q_proj=self.project if projected else torch.nn.Identity(),
            o_proj=self.project,
            rotary_emb=self.rotary,
            layer_idx=0,
        )

    def attention(self):
        return F.scaled_dot_product_attention(self.q, *self.repeated, is_causal=True)

    def column_sums(self):
        """matmul, softmax, sum; a head at a time, so that memory does."""
        future = torch.ones(self.tokens, self.tokens, dtype=torch.bool).triu(1)
        sums = torch.zeros(KV_HEADS, self.tokens)
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            logits = torch.matmul(self.q[0, h], self.k[0, kv].T) * DIM**-0.5
            sums[kv] += logits.masked_fill_(future, -torch.inf).softmax(dim=-1).sum(dim=0)
        return sums

    def press(self, press, projected, kept):
        module = self.module(projected)

        def run():
            k, _ = press.compress(module, self.queries, self.k, self.v, None, {"position_embeddings": self.rope})
            assert abs(k.shape[2] - kept * self.tokens) <= 1
            return k

        return run


def works(prompt, kept=0.1):
    """Name: (kvmeld's benchmark, what runs in PyTorch) of compressions to that share."""
    to = {"compression_ratio": 1 - kept}
    expected = kvpress.ExpectedAttentionPress(**to, use_vnorm=False)
    made = {
        "attention": ("attention", prompt.attention),
        "H2O's sums: matmul, softmax, sum": ("compress/h2o", prompt.column_sums),
    }
    for name, ours, press, projects in (
        ("SnapKVPress", "snapkv", kvpress.SnapKVPress(**to, window_size=32), True),
        ("TOVAPress", "tova", kvpress.TOVAPress(**to), True),
        ("KeyDiffPress", "key_diff", kvpress.KeyDiffPress(**to), False),
        ("ExpectedAttentionPress", "expected_attention", kvpress.ExpectedAttentionPress(**to), True),
        ("CriticalKVPress", None, kvpress.CriticalKVPress(expected), True),
    ):
        bench = f"compress/{ours}" if ours else None
        made[name] = (bench, prompt.press(press, False, kept))
        if projects:
            made[f"{name}, with its projection"] = (bench, prompt.press(press, True, kept))
    return made
