"""Architectures: backbones by name, so that a model file opens without a backbone.

A name is that of a builtin backbone, or `torchvision:NAME` or `timm:NAME` with one of the names that the library lists.
Nothing else that a file names is built, and nothing is imported because of it but these two libraries.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

from cps.network.backbones import BUILTINS
from cps.runtime.extras import install_command, is_installed
from cps.runtime.seeding import seeded
from cps.storage.settings_codec import NumericSettings, setting

TORCHVISION, TIMM = "torchvision", "timm"
INSTALL = install_command("pretrained")
LIBRARY_NAME = re.compile(rf"({TORCHVISION}|{TIMM}):[A-Za-z0-9_.]{{1,100}}")


@setting
@dataclass(frozen=True)
class Architecture(NumericSettings):
    """A backbone by name: builtin, or `torchvision:NAME` or `timm:NAME` without its classification head.

    A model file can hold it, so that the model loads without a backbone. `weights` is a note about the pretrained
    weights that the backbone started with: where they came from, and their digest. They expect the middle of a photo:
    its short side is scaled to `1 + margin` times the image size, and the central square is cropped.
    """

    name: str
    channels: int = 3
    weights: str = ""
    margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in BUILTINS and not (isinstance(self.name, str) and LIBRARY_NAME.fullmatch(self.name)):
            raise ValueError(
                f"unknown backbone '{self.name}'{_nearest(self.name, BUILTINS)}; choose from: {', '.join(BUILTINS)}, "
                f"{TORCHVISION}:NAME or {TIMM}:NAME"
            )
        self._require("margin", 0 <= self.margin <= 1, must="in [0, 1]")
        self._require("channels", 1 <= self.channels <= 64, must="in [1, 64]")
        if not isinstance(self.weights, str):
            raise TypeError(f"weights of Architecture must be text, got {self.weights!r}")

    @property
    def library(self) -> str:
        """The library that has the architecture: "torchvision", "timm", or "" for a builtin one."""
        return self.name.rpartition(":")[0]

    @property
    def name_in_library(self) -> str:
        """The name without that of the library."""
        return self.name.rpartition(":")[2]

    def __call__(self) -> nn.Module:
        """Return a new backbone, initialised by torch's global generator.

        Raise `ValueError` for a name that the installed library does not have.
        """
        self.check_listed()
        if self.library == TORCHVISION:
            return _make_torchvision(self.name_in_library, self.channels)
        if self.library == TIMM:
            import timm

            return timm.create_model(self.name_in_library, pretrained=False, num_classes=0, in_chans=self.channels)
        return BUILTINS[self.name](self.channels)

    def check_listed(self) -> None:
        """Raise `ValueError` with the nearest names if the installed library does not have the architecture."""
        if self.library == TORCHVISION:
            from torchvision import models

            _check_listed(self.name_in_library, models.list_models(module=models), TORCHVISION)
        elif self.library == TIMM:
            if not is_installed(TIMM):
                raise ValueError(f"the backbone '{self.name}' needs {TIMM}; install it with: {INSTALL}")
            import timm

            _check_listed(self.name_in_library, timm.list_models(), TIMM)

    def make(self, seed: int) -> nn.Module:
        """Return a new backbone whose initial weights depend only on the seed."""
        with seeded(torch.device("cpu"), seed):
            return self()


def _make_torchvision(name: str, channels: int) -> nn.Module:
    from torchvision import models

    if channels != 3:
        raise ValueError(f"{TORCHVISION} backbones read images of 3 channels, got {channels}")
    model = models.get_model(name, weights=None)
    heads = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not heads or model.get_submodule(heads[-1]).out_features != 1000:
        raise ValueError(f"'{TORCHVISION}:{name}' does not end in a linear head, so it cannot be used as a backbone")
    model.set_submodule(heads[-1], nn.Identity())
    return model


def _check_listed(name: str, names: list[str], library: str) -> None:
    if name not in names:
        from importlib.metadata import version

        raise ValueError(f"{library} {version(library)} has no network '{name}'{_nearest(name, names)}")


def _nearest(name: object, names: Iterable[str]) -> str:
    """Return the names that are nearest to an unknown one, as part of a message."""
    nearest = get_close_matches(str(name), list(names), n=3)
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""
