# SPDX-License-Identifier: MIT
"""torch.compile of a model with attn_implementation="kvmeld": one graph with a cache of transformers' own."""

import pytest
import torch
from families import MIXED, made
from kvmeld_torch import Cache
from test_families import prompt
from transformers import DynamicCache, StaticCache


def logits(model, forward, cache) -> torch.Tensor:
    """Of a prompt and of three steps."""
    tokens = prompt(23)
    out = []
    with torch.no_grad():
        for first, last in ((0, 20), (20, 21), (21, 22), (22, 23)):
            at = torch.arange(first, last)
            out.append(forward(tokens[:, first:last], position_ids=at[None], past_key_values=cache).logits)
    return torch.cat(out, 1)


SMALL = {"llama": {"num_hidden_layers": 1}, "gemma2": {"num_hidden_layers": 2, "layer_types": MIXED["layer_types"][:2]}}


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_plain_cache_breaks_no_graph(family, kind):
    model, plain = made(family, "kvmeld", **SMALL[family]), made(family, "eager", **SMALL[family])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def cache():
        return DynamicCache(config=model.config) if kind is DynamicCache else StaticCache(model.config, max_cache_len=23)

    wanted = logits(plain, plain, cache())
    torch.testing.assert_close(logits(model, compiled, cache()), wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


def test_a_compiled_model_notices_a_compressed_cache():
    """Where the graph of a plain cache is there already; its own calls are none of the graph's."""
    model = made("llama", "kvmeld", **SMALL["llama"])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    wanted = logits(model, model, Cache("h2o", 10))
    logits(model, compiled, DynamicCache(config=model.config))
    cache = Cache("h2o", 10)
    torch.testing.assert_close(logits(model, compiled, cache), wanted, atol=1e-5, rtol=1e-5)
    assert cache.layers[0].heads.length.max() == 10
