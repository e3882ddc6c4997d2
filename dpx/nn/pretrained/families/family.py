"""The description of a family of models that is needed to read its files."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dpx.nn.pretrained.file_settings import Keys
from dpx.nn.pretrained.layers import TABLES


class Family(NamedTuple):
    """A family of models in folders of Hugging Face.

    Attributes:
      settings: A function that turns config.json into settings of a decoder or an encoder; it refuses unknown
        keys.
      modules: For each parameter, the name of its module in files; {} is the number of the layer.
      architectures: The values of `architectures` that are supported.
      prefix: The prefix of module names in files of models with a head, and in few others.
      unused: Patterns of arrays that have no effect, such as heads that are not used.
      turned: Whether matrices of layers are (out, in) in files.
    """

    settings: Callable[[Keys, str], Any]
    modules: Mapping[str, str]
    architectures: tuple[str, ...]
    prefix: str
    unused: tuple[str, ...] = ()
    turned: bool = True

    def module(self, name: str) -> str:
        """The module that holds a parameter."""
        return self.modules[name.removesuffix("_bias")]

    def array(self, name: str) -> str:
        """The name of a parameter's array."""
        kind = "bias" if name.endswith("_bias") else "weight"
        return f"{self.module(name)}.{kind}"

    def is_turned(self, name: str, stacked: bool) -> bool:
        """Whether a matrix is (out, in) in the file instead of (in, out)."""
        return name not in TABLES and (self.turned or not stacked)

    def canonical(self, name: str) -> str:
        """The name of an array, without differences between versions of the same family."""
        name = name.removeprefix(self.prefix)
        return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))

    def is_unused(self, name: str) -> bool:
        """Whether an array has no effect."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)
