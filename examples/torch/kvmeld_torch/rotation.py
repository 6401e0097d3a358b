# SPDX-License-Identifier: MIT
"""What a model's layers rotate, read off the rows that its own code makes of one token at several positions."""

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROWS = 4  # random hidden states, each at all positions
_SEED = 37

_found: ContextVar[dict | None] = ContextVar("found", default=None)


@dataclass(frozen=True)
class Rotation:
    """Of a layer's queries and keys."""

    frequencies: tuple[float, ...] = ()  # radians per position, of each pair
    interleaved: bool = False  # pairs (2i, 2i + 1), not (i, i + number of pairs)
    last: bool = False  # the pairs are of a head's last dims, not its first


def calling_model() -> tuple[PreTrainedModel, int]:
    """The innermost model in whose forward pass this is called, and the sequences that it was given."""
    frame = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, PreTrainedModel):
            given = [frame.f_locals.get(name) for name in ("inputs_embeds", "input_ids")]
            return model, next((len(x) for x in given if isinstance(x, Tensor)), 1)
        frame = frame.f_back
    raise RuntimeError("kvmeld_torch.Cache: expected a call in a transformers model's forward pass, got another")


def measured(model: PreTrainedModel, tokens: int) -> dict[int, Rotation]:
    """The rotation of each layer with attention by `attn_implementation="kvmeld"`, up to position `tokens - 1`.

    The model runs once on some tokens; every layer sees one random row at all positions. Refused: rows that no table
    of frequencies rotates, to rounding.
    """
    limit = getattr(model.config, "max_position_embeddings", None) or 64
    last = max(tokens, min(limit, 64)) - 1
    positions = torch.tensor([0, *(2**i for i in range(last.bit_length()) if 2**i < last), last])
    at = positions.to(model.device)[None].expand(_ROWS, -1)
    with _one_row_a_sequence(model, len(positions)) as found, torch.no_grad():
        ids, mask = torch.zeros_like(at), torch.ones_like(at)
        model(input_ids=ids, attention_mask=mask, position_ids=at, use_cache=False)
    return {layer: _rotation(name, rows, positions) for layer, (name, rows) in found.items()}


def noted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """While a model is measured: an attention's output; its rows have been noted."""
    found = _found.get()
    if found is None:
        return None
    rows = torch.cat([key, query], 1).flatten(0, 1).detach()  # which rotate alike
    found[module.layer_idx] = (type(module).__name__, rows)
    return value.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2).contiguous()


@contextmanager
def _one_row_a_sequence(model: PreTrainedModel, count: int):
    """Each layer's input is a random row of a sequence, the same at all of `count` tokens.

    In this thread alone: others may run the model meanwhile, or measure it.
    """
    draw = torch.Generator().manual_seed(_SEED)
    found = {}

    def repeated(_module, args, given):
        if _found.get() is not found:
            return None
        name = "hidden_states"
        hidden = given[name] if name in given else args[0]
        row = torch.randn(_ROWS, 1, hidden.shape[-1], generator=draw).to(hidden)
        row = row.expand(-1, count, -1).contiguous()
        return (args, given | {name: row}) if name in given else ((row, *args[1:]), given)

    layers = [m for m in model.modules() if hasattr(m, "layer_idx")]
    hooks = [m.register_forward_pre_hook(repeated, with_kwargs=True) for m in layers]
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)
        for hook in hooks:
            hook.remove()


def _rotation(name: str, rows: Tensor, positions: Tensor) -> Rotation:
    """Of rows [rows, positions, dim]; the positions at most double, so that angles are known beyond a turn."""
    eps = torch.finfo(rows.dtype).eps
    x = rows.double().cpu()
    size = float(x.abs().max())
    moved = ((x - x[:, :1]).abs().amax((0, 1)) > 16 * eps * size).nonzero().flatten()
    if len(moved) == 0:
        return Rotation()
    first = int(moved[0])
    # The length of a pair is the same at all positions.
    lengths = x[..., first, None] ** 2 + x[..., first + 1 :] ** 2
    change = (lengths - lengths[:, :1]).abs().sum((0, 1))
    partner = 1 + int(change.argmin()) if len(change) else x.shape[-1]
    interleaved = partner == 1
    end = x.shape[-1] if first else int(moved[-1]) + 2  # some may turn by less than rounding
    pairs = (end - first) // 2 if interleaved else partner
    here = torch.arange(pairs)
    i, j = (first + 2 * here, first + 2 * here + 1) if interleaved else (first + here, first + here + pairs)
    if int(j[-1]) >= x.shape[-1] or (first and int(j[-1]) + 1 < x.shape[-1]):
        i, j, pairs = i[:0], j[:0], 0
    pair = torch.complex(x[..., i], x[..., j])
    angle = (pair * pair[:, :1].conj()).sum(0).angle()  # [positions, pairs], within a turn
    frequency = torch.zeros(pairs, dtype=torch.float64)
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
    return Rotation(tuple(frequency.tolist()), interleaved, first > 0)
