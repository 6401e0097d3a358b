# SPDX-License-Identifier: MIT
"""Assisted generation: drafted tokens are decode steps, and those that are rejected were never there."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from ._versions import cache_of
from .cache import Cache

_BY_TOKEN = ("input_ids", "position_ids", "cache_position", "token_type_ids")  # [..., tokens] of a forward pass


def _part(given: dict[str, Any], first: int, last: int, kept: int) -> dict[str, Any]:
    """What a forward pass takes of the new tokens `first` to `last` alone, for the logits of `kept`."""
    part = {name: x[..., first:last] if name in _BY_TOKEN and x is not None else x for name, x in given.items()}
    mask = given.get("attention_mask")
    if mask is not None:
        part["attention_mask"] = mask[..., : mask.shape[-1] - given["input_ids"].shape[1] + last]
    return part | {"logits_to_keep": kept}


@contextmanager
def drafts(model: PreTrainedModel) -> Iterator[None]:
    """While it is open, `model.generate` with `assistant_model` or `prompt_lookup_num_tokens` takes a Cache.

    Tokens are those of `generate` without them, whatever the policy evicts: a prompt is read and compressed before
    what is drafted with it. Refused: a model whose `forward` has no `logits_to_keep`, which tells what is drafted.
    """
    forward, was = model.forward, vars(model).get("forward")
    if "logits_to_keep" not in inspect.signature(forward).parameters:
        raise RuntimeError(
            f"drafts: expected a model that takes logits_to_keep, got {type(model).__name__} without it"
        )

    @wraps(forward)
    def in_parts(*args: Any, **given: Any) -> Any:
        cache, kept = cache_of(given), given.get("logits_to_keep")
        drafted = kept - 1 if isinstance(cache, Cache) and isinstance(kept, int) else 0
        if drafted <= 0:
            return forward(*args, **given)
        tokens = given["input_ids"].shape[1]
        before = tokens - drafted
        if before == 1 and cache.layers:  # the token chosen last is the first step
            with cache.draft():
                return forward(*args, **given)
        prompt = model(*args, **_part(given, 0, before, 1))
        with cache.draft():
            out = forward(*args, **_part(given, before, tokens, drafted))
        out.logits = torch.cat([prompt.logits, out.logits], 1)
        return out

    model.forward = in_parts
    try:
        yield
    finally:
        del model.forward
        if was is not None:  # a hook's, or that of a `with drafts` around this one
            model.forward = was
