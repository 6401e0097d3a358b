# SPDX-License-Identifier: MIT
"""Heads that hold a prompt of random numbers."""

import torch
from kvmeld_torch import Heads, Policy, Spec

HEADS, GROUP, DIM, TOKENS = 3, 2, 16, 60
BUDGET = 40


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def prompt(policy, *, capacity=TOKENS + 20, dtype=torch.float32, transposed=False):
    """Heads that hold a prompt, and its queries."""
    if transposed:  # [capacity, heads, dim] in memory, and values by columns
        keys = rows(capacity, HEADS, DIM, dtype=dtype).transpose(0, 1)
        values = rows(HEADS, DIM, capacity, dtype=dtype).transpose(1, 2)
    else:
        keys, values = rows(HEADS, capacity, DIM, dtype=dtype), rows(HEADS, capacity, DIM, dtype=dtype)
    heads = Heads.over(Policy(policy), Spec(GROUP), keys, values, tokens=TOKENS)
    return heads, rows(HEADS, GROUP, TOKENS, DIM, dtype=dtype)


def copied(heads):
    return heads.chosen(torch.arange(heads.heads))
