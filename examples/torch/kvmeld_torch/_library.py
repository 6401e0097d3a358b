# SPDX-License-Identifier: MIT
"""torch.ops.kvmeld: the operators of csrc/, and what torch.compile has to know of them."""

import os
from importlib.resources import files
from pathlib import Path

import torch


def path() -> Path:
    """Where the built library is: beside this file where pip installed both."""
    name = "libkvmeld_torch.so"
    installed = files(__package__) / name
    built = Path(__file__).parents[3] / "build/torch/extension" / name
    named = os.environ.get("KVMELD_TORCH_LIBRARY")
    path = Path(named) if named else Path(str(installed)) if installed.is_file() else built
    if not path.exists():
        raise ImportError(f"kvmeld_torch: expected {path}; `pip install ./examples/torch` builds it")
    return path


def load(path: Path) -> None:
    """The library at `path`, if it was built with this PyTorch, on whose C++ it depends."""
    built, found = path.with_name("torch_version.txt").read_text().strip(), torch.__version__
    if built.split(".")[:2] != found.split(".")[:2]:
        raise ImportError(f"kvmeld_torch: expected PyTorch {built}, which it was built with, got {found}")
    torch.ops.load_library(str(path))


load(path())


def _same_device(*tensors: torch.Tensor | None) -> None:
    found = {x.device.type for x in tensors if x is not None}
    if len(found) > 1:
        raise RuntimeError(f"kvmeld: expected tensors on one device, got some on {', '.join(sorted(found))}")


def _written(cache: list[torch.Tensor]) -> torch.dtype:
    """Of rows that operators make: kernels write the cache's, the CPU float32."""
    return torch.float32 if cache[0].device.type == "cpu" else cache[0].dtype


def _value_dim(cache: list[torch.Tensor]) -> int:
    """Of rows in few bits the shape of those in half says it."""
    return cache[1 if len(cache) == 9 else 10].shape[-1]


def _slots(cache: list[torch.Tensor]) -> int:
    """Of the head that has most; packed heads say it in numbers."""
    return cache[0].shape[1] if cache[0].ndim > 2 else torch.library.get_ctx().new_dynamic_size()


@torch.library.register_fake("kvmeld::compress")
def _compress(policy, cache, queries, budget, *, positions=None, **_):
    _same_device(*cache, queries, positions)


@torch.library.register_fake("kvmeld::observe")
def _observe(policy, cache, queries, **_):
    _same_device(*cache, queries)
    heads, group, _tokens, dim = queries.shape
    kept = torch.library.get_ctx().new_dynamic_size()  # the policy's choice
    size = (heads, group, kept, dim)
    return queries.new_empty(size, dtype=_written(cache)), queries.new_empty(kept, dtype=torch.int32)


@torch.library.register_fake("kvmeld::shared_scores")
def _shared_scores(policy, cache, **_):
    return cache[0].new_empty(cache[4].shape[0], _slots(cache), dtype=torch.float32)


@torch.library.register_fake("kvmeld::convert")
def _convert(to, cache, **_):
    _same_device(*to, *cache)


@torch.library.register_fake("kvmeld::observe_step")
def _observe_step(policy, cache, probabilities, log_sum_exp=None, query=None, **_):
    _same_device(*cache, probabilities, log_sum_exp, query)


@torch.library.register_fake("kvmeld::step")
def _step(policy, cache, q, k, v, budget, **_):
    _same_device(*cache, q, k, v)
    return q.new_empty(*q.shape[:2], _value_dim(cache), dtype=_written(cache))


@torch.library.register_fake("kvmeld::attend")
def _attend(policy, cache, q, *, probabilities=False, **_):
    _same_device(*cache, q)
    heads, group, _dim = q.shape
    slots = _slots(cache) if probabilities else 0
    sizes = [(heads, group), (heads, group, slots)]
    out = q.new_empty(heads, group, _value_dim(cache), dtype=_written(cache))
    return out, *(q.new_empty(x, dtype=torch.float32) for x in sizes)


ops = torch.ops.kvmeld
