# SPDX-License-Identifier: MIT
"""kvmeld's cache compression inside PyTorch and transformers."""

from . import _versions  # noqa: F401  # before what another version cannot import
from ._library import ops
from .cache import Cache
from .drafts import drafts
from .heads import Heads, Policy
from .second_reading import replay
from .spec import Spec

__all__ = ["Cache", "Heads", "Policy", "Spec", "drafts", "ops", "replay"]
