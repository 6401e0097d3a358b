"""kvfold's cache compression inside PyTorch and transformers."""

from ._library import ops
from .heads import Heads, Policy

__all__ = ["Heads", "Policy", "ops"]
