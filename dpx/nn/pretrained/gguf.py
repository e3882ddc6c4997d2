"""Models in GGUF files, the format of llama.cpp: their settings and arrays.

It needs the extra `lm`: pip install -e ".[lm]".
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpx.nn.pretrained import tokenizer
from dpx.nn.pretrained.families import FAMILIES, GGUF_MODULES
from dpx.nn.pretrained.file_settings import Keys
from dpx.nn.pretrained.packages import needed
from dpx.nn.pretrained.settings import DecoderSettings, Rotary

_STRETCHED = "rope_freqs.weight"
_UNUSED = ("llama.tensor_data_layout",)
# Settings by their names in files, after "llama."; the others have defaults that follow from these.
_NAMES = {
    "dim": "embedding_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "mlp_dim": "feed_forward_length",
    "norm_epsilon": "attention.layer_norm_rms_epsilon",
}
# Keys that affect a model, unless they have this value.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scale_linear": 1,
    "rope.scaling.factor": 1,
    "rope.scaling.type": "none",
}


class GGUF:
    """A GGUF file. Arrays are read when they are requested.

    Attributes:
      path: The file.
      family: The family, which determines the names of arrays.
      settings: The settings of the model.

    Raises:
      ModuleNotFoundError: without the package gguf.
      FileNotFoundError: if there is no such file.
      ValueError: for a file that is not GGUF, is incomplete, is one of several parts of a model, or has the
        byte order of another machine.
    """

    family = FAMILIES["llama"]._replace(
        modules=GGUF_MODULES, prefix="", unused=(re.escape(_STRETCHED),)
    )

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._package = needed("gguf", "GGUF files")
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: no such file; check --config.model.path")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} must be a GGUF file, which this is not: check the path")
        try:
            reader = self._package.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{path} must be a whole GGUF file, and is damaged or cut off ({reason}): fetch it again"
            ) from None
        # For such a file, gguf swaps the bytes of the header but not those of arrays.
        if reader.byte_order == "S":
            raise ValueError(
                f"{path} must have its bytes in the order of this machine: convert it with "
                "gguf-convert-endian"
            )
        self._fields = reader.fields
        if (parts := self.get("split.count", 1)) > 1:
            raise ValueError(
                f"{path} must be a whole model, and is part {self.get('split.no', 0) + 1} of {parts}: join "
                "all of them by llama-gguf-split --merge, given the first one"
            )
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def __contains__(self, key: str) -> bool:
        """Whether there is metadata of that name."""
        return key in self._fields

    def __getitem__(self, key: str) -> Any:
        """Metadata: a number, a text, or a list of these; raises ValueError for an unknown name."""
        if key not in self._fields:
            raise ValueError(f"{self.path} must hold {key!r}, and does not: use another file")
        return self._fields[key].contents()

    def get(self, key: str, default: Any) -> Any:
        """Metadata, or `default` if there is none of that name."""
        return self[key] if key in self._fields else default

    def names(self) -> Iterator[str]:
        """The names of the arrays."""
        return iter(self._tensors)

    def array(self, name: str) -> np.ndarray:
        """An array, dequantised to float32; the rows of a matrix are outputs.

        The rows of queries and keys are reordered as in Hugging Face.

        Raises:
          ValueError: for an unknown name or quantisation.
        """
        if name not in self._tensors:
            raise ValueError(f"{self.path} must hold the array {name!r}: use another file")
        tensor = self._tensors[name]
        try:
            numbers = self._package.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.path} holds {name!r} as {tensor.tensor_type.name}, which gguf does not decode: "
                "use a file with another quantisation, such as Q8_0"
            ) from None
        numbers = np.asarray(numbers, np.float32)
        return self._reordered(name, numbers, (-1, 2))

    def _reordered(self, name: str, array: np.ndarray, order: tuple[int, int]) -> np.ndarray:
        """An array with the rows of each head of queries or keys from `order`, pairs or halves, in the other.

        In a file the two coordinates of a rotary pair are neighbours, (-1, 2); in Hugging Face one is in the
        first half of a head, (2, -1).
        """
        heads = {"attn_q": self.settings.num_heads, "attn_k": self.settings.kv_heads}
        count = heads.get(name.removesuffix(".weight").rpartition(".")[2], 0)
        if not count or array.shape[0] % (2 * count):
            return array  # a wrong shape is refused later
        rows = array.reshape(count, *order, array.shape[-1])
        return rows.swapaxes(1, 2).reshape(array.shape)

    def rewrite(self, path: str | Path, arrays: dict[str, np.ndarray]) -> None:
        """Writes the file anew, with these arrays, in float32, in the place of those that they differ from.

        Args:
          path: The new file.
          arrays: By name, as `array` gives them.
        """
        writer = self._package.GGUFWriter(path, self["general.architecture"])
        for key, field in self._fields.items():
            # What the writer writes by itself, and how most arrays were quantised.
            if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
                continue
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], sub_type=kinds[-1])
        for name, tensor in self._tensors.items():
            value = arrays.get(name)
            if value is None or np.array_equal(value, self.array(name)):
                writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
            else:
                value = self._reordered(name, value, (2, -1))
                writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @functools.cached_property
    def settings(self) -> DecoderSettings:
        """The settings of the model.

        Raises:
          ValueError: for another architecture, or unknown settings, which might change the model.
        """
        kind = self["general.architecture"]
        if kind != "llama":
            raise ValueError(
                f"{self.path} must be of architecture 'llama', and is {kind!r}: use a folder of Hugging "
                "Face, or another model"
            )
        keys = Keys(str(self.path), {k: self[k] for k in self._fields if k.startswith("llama.")})
        found = keys.settings({setting: f"llama.{name}" for setting, name in _NAMES.items()})
        heads = found["num_heads"]
        width = keys.size("llama.attention.key_length", max(found["dim"] // heads, 1))
        tokens = len(self.get("tokenizer.ggml.tokens", ()))
        vocab_size = keys.size("llama.vocab_size", tokens)
        if tokens > vocab_size:
            raise ValueError(
                f"{self.path} has {tokens} tokens and llama.vocab_size={vocab_size}, which must be at least "
                "as many: fetch it again"
            )
        factors = None
        if _STRETCHED in self._tensors:
            factors = tuple(float(x) for x in self._tensors[_STRETCHED].data)
        settings = DecoderSettings(
            **found,
            vocab_size=vocab_size,
            num_kv_heads=keys.size("llama.attention.head_count_kv", heads),
            head_dim=width,
            rotary=Rotary(keys.number("llama.rope.freq_base", 10000.0), factors),
            context_length=keys.optional_size("llama.context_length"),
            tied="output.weight" not in self._tensors,
        )
        widths = {"rope.dimension_count": width, "attention.value_length": width}
        keys.close(_UNUSED, {f"llama.{k}": v for k, v in (_NEUTRAL | widths).items()})
        return settings

    def tokenizer(self) -> tokenizer.Tokenizer:
        """The tokenizer of the file; see `dpx.nn.pretrained.tokenizer.from_gguf`."""
        return tokenizer.from_gguf(self)
