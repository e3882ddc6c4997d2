"""Models in folders, as `transformers` saves them: config.json, safetensors, and tokenizer.json.

It needs the extra `lm`: pip install -e ".[lm]".
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpx.nn.pretrained import tokenizer
from dpx.nn.pretrained.families import FAMILIES
from dpx.nn.pretrained.file_settings import Keys
from dpx.nn.pretrained.packages import needed
from dpx.nn.pretrained.settings import EncoderSettings

_TYPES = {"F32", "F16", "BF16"}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Folder:
    """A model in a folder. Weights are mapped into memory, and copied when they are requested.

    Attributes:
      path: The folder.
      config: The content of config.json.
      family: The family, which determines the names of arrays.
      settings: The settings of the model.

    Raises:
      ModuleNotFoundError: without the package safetensors.
      ValueError: for a file that is missing, damaged or incomplete, weights in other types than float32,
        float16 and bfloat16, or an unknown family, kind of head or setting.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._package = needed("safetensors", "Folders of Hugging Face")
        if not (self.path / "config.json").exists():
            adapters = (self.path / "adapter_config.json").exists()
            instead = "holds adapters: load their model, then dpx.nn.peft.load" if adapters else ""
            raise ValueError(
                f"{path} must hold config.json of a model, and does not"
                f"{', but ' + instead if instead else ': check the path'}"
            )
        self.config = read_json(self.path / "config.json")
        keys = Keys(str(self.path / "config.json"), self.config)
        kind, architectures = (self.config.get(key) for key in ("model_type", "architectures"))
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise keys.wrong("model_type", kind, f"must be one of {', '.join(FAMILIES)}")
        self.family = FAMILIES[kind]
        known = self.family.architectures
        if architectures not in [[name] for name in known]:
            raise keys.wrong("architectures", architectures, f"must be one of {', '.join(known)}")
        self.settings = self.family.settings(keys, kind)
        self._files = self._open()
        self._names = {self.family.canonical(name): name for name in self._files}
        if twice := sorted(self._files.keys() - set(self._names.values())):
            raise ValueError(
                f"{self.path} holds {twice[0]} a second time, by an older name: fetch it again"
            )

    def _open(self) -> dict[str, Any]:
        """The open file that holds each array, by its name in the file."""
        index = self.path / _INDEX
        if (self.path / _WEIGHTS).exists():
            opened = open_safetensors(self.path / _WEIGHTS, self._package)
            return dict.fromkeys(opened.keys(), opened)
        if not index.exists():
            others = sorted(self.path.glob("*.bin"))
            which = (
                f"{others[0].name} is a pickle, which is not read" if others else "check the path"
            )
            raise ValueError(f"{self.path} must hold {_WEIGHTS}, and does not: {which}")
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, Mapping) or not placed:
            raise ValueError(f"{index} must hold weight_map, and does not: fetch it again")
        for file in placed.values():
            if Path(str(file)).name != file:
                raise ValueError(f"{index} names {file!r}, which must be a file beside it")
        parts = sorted(set(placed.values()))
        files = {file: open_safetensors(self.path / file, self._package) for file in parts}
        held = {(name, file) for file, opened in files.items() for name in {*opened.keys()}}
        if odd := sorted(held ^ set(placed.items())):
            name, file = odd[0]
            raise ValueError(
                f"{self.path / file} must hold the arrays that {_INDEX} names, and does not, as for {name}: "
                "fetch it again"
            )
        return {name: files[file] for name, file in placed.items()}

    def names(self) -> Iterator[str]:
        """The canonical names of the arrays."""
        return iter(self._names)

    def array(self, name: str) -> np.ndarray:
        """An array by its canonical name, in the stored type; raises ValueError if there is none."""
        if name not in self._names:
            raise ValueError(
                f"{self.path} must hold the array {name!r}, and does not: use another model"
            )
        stored = self._names[name]
        return read_array(self._files[stored], stored, self.path)

    def stored_name(self, name: str) -> str:
        """The name in the files of the array with that canonical name."""
        return self._names[name]

    def tokenizer(self) -> tokenizer.Tokenizer:
        """The tokenizer in tokenizer.json.

        Raises:
          ModuleNotFoundError: without the package tokenizers.
          ValueError: for a file that is missing or damaged, or with more tokens than the model has.
        """
        path = self.path / "tokenizer.json"
        marks = isinstance(self.settings, EncoderSettings)
        starts = [self.config.get(key) for key in ("bos_token_id", "eos_token_id")]
        return tokenizer.from_json(path, self.settings.vocab_size, starts, marks=marks)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; raises ValueError if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, and is not ({error}): fetch it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold settings by name, and does not: fetch it again")
    return content


def open_safetensors(path: Path, package: Any) -> Any:
    """Opens a file of safetensors; raises ValueError if it is missing, damaged or incomplete."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: fetch it again")
    try:
        return package.safe_open(path, framework="numpy")
    except (package.SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} must be a whole file of safetensors, and is damaged or cut off ({reason}): fetch it "
            "again"
        ) from None


def read_array(opened: Any, name: str, path: Path) -> np.ndarray:
    """An array of an open file, in the stored type."""
    kind = opened.get_slice(name).get_dtype()
    if kind not in _TYPES:
        raise ValueError(
            f"{path} holds {name} as {kind}, which must be one of {', '.join(sorted(_TYPES))}: use "
            "another model"
        )
    return opened.get_tensor(name)
