"""Evenstep: trains any PyTorch model on unequal devices, each with the work it can finish in the same time."""

from evenstep._core import EvenstepError
from evenstep._core import version as __version__
from evenstep.registration import register as _register_backend

__all__ = ["EvenstepError", "__version__"]

_register_backend()
