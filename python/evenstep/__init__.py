"""Evenstep: trains any PyTorch model on unequal devices, each with the work it can finish in the same time."""

from evenstep._core import EvenstepError
from evenstep._core import version as __version__

__all__ = ["EvenstepError", "__version__"]
