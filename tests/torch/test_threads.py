# SPDX-License-Identifier: MIT
"""Threads that use one model at the same time, each with caches of its own."""

from concurrent.futures import ThreadPoolExecutor

import torch
from families import made
from kvmeld_torch import Cache
from test_families import TURNS
from transformers import DynamicCache

THREADS, PROMPTS = 4, 8


def test_tokens_are_those_of_each_prompt_alone():
    """Three threads compress, and one has transformers' own cache."""
    model = made("llama", "kvmeld")
    draw = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, 128, (THREADS, PROMPTS, 1, 40), generator=draw)
    caches = [lambda: Cache("fold", 0.5), lambda: Cache("h2o", 0.5), lambda: Cache("tova", 200), DynamicCache]

    def answers(thread: int) -> list[torch.Tensor]:
        return [model.generate(x, past_key_values=caches[thread](), **TURNS) for x in prompts[thread]]

    alone = [answers(thread) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(answers, range(THREADS)))
    for mine, wanted in zip(together, alone):
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted))
