# SPDX-License-Identifier: MIT
"""The versions of transformers that this adapter is tested with, and where they differ."""

import warnings
from typing import Any

import transformers

OLDEST, NEWEST = "5.1", "5.24"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in version.split(".")[:2])


def cache_of(given: dict[str, Any]) -> Any:
    """Of a forward pass's arguments the cache, whose older name is past_key_values; None: it has none."""
    return given.get("cache") if given.get("cache") is not None else given.get("past_key_values")


def check(version: str = transformers.__version__) -> None:
    """Refused: a version below the oldest. A version above the newest gives a warning."""
    words = f"kvmeld_torch: expected transformers {OLDEST} to {NEWEST}, got {version}"
    if _minor(version) < _minor(OLDEST):
        raise ImportError(words)
    if _minor(version) > _minor(NEWEST):
        warnings.warn(f"{words}, which is not tested", stacklevel=3)


check()
