"""Continual Prune-and-Select: one network learns task after task and never forgets.

Public names are listed in `__init__.pyi` and imported on first use, so `import cps` does not import torch.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
