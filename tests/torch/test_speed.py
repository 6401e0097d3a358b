# SPDX-License-Identifier: MIT
"""python -m kvmeld_torch.speed times `generate` as it is."""

import torch
from kvmeld_torch import Cache, speed


def test_a_generation_is_timed_from_its_prompt_to_its_last_token(model, text):
    past = []

    def cache():
        past.append(Cache("h2o", 0.5))
        return past[-1]

    first, step, both, size = speed.generation(model, "kvmeld", torch.tensor([text[:200]]), cache, 12)
    assert 0 < first < both and 12 * step * 1e-3 < 2 * (both - first)
    heads = past[0].layers[0].heads
    assert heads.seen.tolist() == [200 + 12] * 4  # of 13 tokens the last is not read
    assert size == past[0].nbytes() / 2**20
