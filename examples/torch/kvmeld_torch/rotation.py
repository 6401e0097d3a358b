# SPDX-License-Identifier: MIT
"""What a model's layers rotate, read off the rows that its own code makes of one token at several positions."""

import sys
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROWS = 4  # random hidden states, each at all positions
_SEED = 37
_EQUAL = 1e-6  # of sums of products: fewer pairs are as good then


class _Noting(threading.local):
    """Of each thread: what a model that is measured has shown of its layers; None: none is."""

    def __init__(self):
        self.found: dict | None = None


_noting = _Noting()


@dataclass(frozen=True)
class Rotation:
    """Of a layer's queries and keys."""

    frequencies: tuple[float, ...] = ()  # radians per position, of each pair
    interleaved: bool = False  # pairs (2i, 2i + 1), not (i, i + number of pairs)
    last: bool = False  # the pairs are of a head's last dims, not its first


def calling_model() -> tuple[PreTrainedModel, dict[str, Any]]:
    """The innermost model in whose forward pass this is called, and what it was given."""
    frame = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, PreTrainedModel):
            return model, frame.f_locals
        frame = frame.f_back
    raise RuntimeError("kvmeld_torch.Cache: expected a call in a transformers model's forward pass, got another")


def measured(model: PreTrainedModel, tokens: int, layers: Container[int] | None = None) -> dict[int, Rotation]:
    """The rotation of each layer with attention by `attn_implementation="kvmeld"`, up to position `tokens - 1`.

    The model runs once on some tokens; every layer sees one random row at all positions. Refused: rows of one of
    `layers` (by default all) that no table of frequencies rotates, to rounding.
    """
    limit = getattr(model.config, "max_position_embeddings", None) or 64
    last = max(tokens, min(limit, 64)) - 1
    positions = torch.tensor([0, *(2**i for i in range(last.bit_length()) if 2**i < last), last])
    at = positions.to(model.device)[None].expand(_ROWS, -1)
    whole = torch.autocast(model.device.type, enabled=False)  # whose rounding is no rotation
    with _one_row_a_sequence(model, len(positions)) as (apart, found), torch.no_grad(), whole:
        ids, mask = torch.zeros_like(at), torch.ones_like(at)
        apart(input_ids=ids, attention_mask=mask, position_ids=at, use_cache=False)
    wanted = [layer for layer in found if layers is None or layer in layers]
    return {layer: _rotation(*found[layer], positions) for layer in wanted}


def noted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """While a model is measured: an attention's output; its rows have been noted."""
    if _noting.found is None:
        return None
    rows = torch.cat([key, query], 1).flatten(0, 1).detach()  # which rotate alike
    _noting.found[module.layer_idx] = (type(module).__name__, rows)
    return value.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2).contiguous()


def _apart(model: nn.Module) -> nn.Module:
    """The model's modules once more, over the same weights: other threads do not run these, nor meet their hooks."""
    twins = {m: object.__new__(type(m)) for m in model.modules()}

    def twin(x: Any) -> Any:
        return twins[x] if isinstance(x, nn.Module) and x in twins else x

    for m, other in twins.items():
        for name, x in vars(m).items():
            if isinstance(x, dict):  # parameters, buffers, modules, hooks
                x = type(x)((key, twin(value)) for key, value in x.items())
            elif isinstance(x, MethodType):  # a forward of the module's own
                x = MethodType(x.__func__, twin(x.__self__))
            elif isinstance(x, partial):
                x = partial(x.func, *map(twin, x.args), **x.keywords)
            other.__dict__[name] = x
        other.__dict__["_compiled_call_impl"] = None
    return twins[model]


@contextmanager
def _one_row_a_sequence(model: PreTrainedModel, count: int) -> Iterator[tuple[nn.Module, dict]]:
    """The model, apart, where each layer's input is a random row of a sequence, the same at all of `count` tokens."""
    draw = torch.Generator().manual_seed(_SEED)
    apart, found = _apart(model), {}

    def repeated(_module, args, given):
        name = "hidden_states"
        hidden = given[name] if name in given else args[0]
        row = torch.randn(_ROWS, 1, hidden.shape[-1], generator=draw).to(hidden)
        row = row.expand(-1, count, -1).contiguous()
        return (args, given | {name: row}) if name in given else ((row, *args[1:]), given)

    for m in apart.modules():
        if hasattr(m, "layer_idx"):
            m.register_forward_pre_hook(repeated, with_kwargs=True)
    _noting.found = found
    try:
        yield apart, found
    finally:
        _noting.found = None


def _pairs(x: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Rotation]:
    """Which dims of rows [rows, positions, dim] rotate together: of each pair the first, the second; and the layout.

    The length of a pair is the same at all positions: what its one dim's square gains the other's loses, so that the
    products of the two changes are least for the true pairs. Pairs that are too short to be seen to move are among them.
    """
    dim, lowest, highest = x.shape[-1], int(moved[0]), int(moved[-1])
    change = (x**2 - x[:, :1] ** 2).flatten(0, 1)
    product = change.T @ change
    none = torch.empty(0, dtype=torch.long)
    found, least = (none, none, Rotation()), float(product.abs().sum()) + 1
    for pairs in range(1, dim // 2 + 1):
        for first in (0, dim - 2 * pairs):
            if not first <= lowest <= highest < first + 2 * pairs:
                continue
            here = torch.arange(pairs)
            for interleaved in (False, True):
                i, j = (2 * here, 2 * here + 1) if interleaved else (here, here + pairs)
                products = float(product[first + i, first + j].sum())
                if products < least - _EQUAL * abs(least):
                    found = first + i, first + j, Rotation(interleaved=interleaved, last=first > 0)
                    least = products
    return found


def _rotation(name: str, rows: Tensor, positions: Tensor) -> Rotation:
    """Of rows [rows, positions, dim]; the positions at most double, so that angles are known beyond a turn."""
    eps = torch.finfo(rows.dtype).eps
    x = rows.double().cpu()
    size = float(x.abs().max())
    moved = ((x - x[:, :1]).abs().amax((0, 1)) > 16 * eps * size).nonzero().flatten()
    if len(moved) == 0:
        return Rotation()
    i, j, layout = _pairs(x, moved)
    pair = torch.complex(x[..., i], x[..., j])
    angle = (pair * pair[:, :1].conj()).sum(0).angle()  # [positions, pairs], within a turn
    frequency = torch.zeros(len(i), dtype=torch.float64)
    for position, within in zip(positions[1:].tolist(), angle[1:]):
        turns = ((frequency * position - within) / (2 * torch.pi)).round()
        frequency = (within + 2 * torch.pi * turns) / position
    rotated = x[:, :1].repeat(1, len(positions), 1)
    turned = pair[:, :1] * torch.polar(torch.ones(()).double(), positions[:, None] * frequency)
    rotated[..., i], rotated[..., j] = turned.real, turned.imag
    # A model's angles are floats, whose rounding grows with the position.
    rounding = 16 * eps + 4 * torch.finfo(torch.float32).eps * positions
    off = (rotated - x).abs().amax((0, 2)) / size
    worst = int((off - rounding).argmax())
    if not off[worst] <= rounding[worst]:
        raise RuntimeError(
            f"kvmeld: {name}: expected queries and keys rotated in pairs by a frequency each, got rows that differ by "
            f"{off[worst]:.2g} of the largest number at position {positions[worst]} (rounding: {rounding[worst]:.2g})"
        )
    return replace(layout, frequencies=tuple(frequency.tolist()))
