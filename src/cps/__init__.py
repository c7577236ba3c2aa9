"""Continual Prune-and-Select: one network learns task after task and never forgets.

Public names are listed in `__init__.pyi` and imported on first use, so `import cps` does not import torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lazy_loader

__version__ = "0.2.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name or a module; raise an error that Python completes by the most similar name otherwise."""
    if name in __all__:
        return _import_name(name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'cps' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
