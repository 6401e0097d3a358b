# SPDX-License-Identifier: MIT
"""KVzip's second reading (arXiv 2505.23416): after a prompt the model reads it once more.

What the queries of that look up stays.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import zip_longest

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ._versions import cache_of
from .cache import Cache
from .layer import Layer, end_prompt

CHUNK = 2048  # tokens of a prompt that are read again at a time, as by the authors
_BEFORE = 8  # tokens before a later chunk, by which its words name it


def parts(prompt: Tensor, encode: Callable[[str], list[int]], end: str) -> list[Tensor]:
    """What is read after a prompt [tokens]: for each chunk of it KVzip's words, and the chunk."""
    chunks = prompt.split(CHUNK)
    whole = encode("\n\nRepeat the previous context exactly.")
    part = encode("\n\nRepeat the part of the previous context exactly, starting with")
    made = []
    for i, chunk in enumerate(chunks):
        words = part + chunks[i - 1][-_BEFORE:].tolist() if i else whole
        made.append(torch.cat([prompt.new_tensor(words + encode(end)), chunk]))
    return made


def _read(model: PreTrainedModel, cache: Cache, tokens: Tensor, mask: Tensor, begin: list[int], *words) -> None:
    """The second reading of prompts [batch, tokens] with a mask of what is not padding, at positions from `begin`."""
    each = [parts(row[real.bool()], *words) for row, real in zip(tokens, mask)]
    for of_all in zip_longest(*each, fillvalue=tokens[0, :0]):
        width = max(map(len, of_all))
        behind = tokens.new_zeros(len(of_all), width)
        real, position = torch.zeros_like(behind), torch.zeros_like(behind)
        for b, part in enumerate(of_all):
            first = width - len(part)
            behind[b, first:], real[b, first:] = part, 1
            position[b, first:] = torch.arange(begin[b], begin[b] + len(part))
        model.base_model(
            input_ids=behind,
            attention_mask=torch.cat([mask, real], 1),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )


@contextmanager
def replay(model: PreTrainedModel, encode: Callable[[str], list[int]], end: str = "\n") -> Iterator[None]:
    """While it is open, the model reads prompts of kvzip's caches twice, as part of their forward pass.

    encode: text to tokens, without special ones. end: what stands between the words "Repeat the previous context
    exactly." and the prompt; with a chat template the end of the user's turn and the beginning of the model's.
    """

    def again(_module, args, given, _output) -> None:
        cache = cache_of(given)
        if not isinstance(cache, Cache) or not cache.replay or not cache.compressed or not cache.compressed[0].pending:
            return
        tokens = given.get("input_ids", args[0] if args else None)
        mask = given.get("attention_mask")
        if tokens is None or (mask is not None and mask.shape != tokens.shape):
            raise RuntimeError("kvmeld: replay: expected input_ids and a mask [batch, tokens] or none, got others")
        mask = torch.ones_like(tokens) if mask is None else mask.long()
        at = given.get("position_ids")  # a model that is told none counts padding too
        begin = [tokens.shape[1]] * len(tokens) if at is None else (at[:, -1] + 1).expand(len(tokens)).tolist()
        for layer in cache.compressed:
            layer.reading_again = True
        layers = [layer if isinstance(layer, Layer) else copy(layer) for layer in cache.layers]
        try:
            _read(model, cache, tokens, mask, begin, encode, end)
        finally:
            cache.layers = layers  # windows hold the prompt's tokens, as before
            for layer in cache.compressed:
                layer.reading_again = False
        end_prompt(cache.compressed)

    hook = model.register_forward_hook(again, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
