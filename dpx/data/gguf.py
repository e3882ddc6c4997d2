"""Language models in GGUF files, the format of llama.cpp: their settings, arrays and tokenizers.

Needs the extra `lm`: pip install -e ".[lm]".
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Regular expressions that cut a text into words before bytes are merged within each, by the name in the file.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS = {"gpt-2": (_GPT2,), "smollm": (r"\p{N}", _GPT2), "llama-bpe": (_LLAMA3,)}
_SEPARATOR = "<|endoftext|>"


class GGUF:
    """A GGUF file, of which only what is asked for is read.

    Raises:
      ModuleNotFoundError: without the package gguf.
      FileNotFoundError: if there is no such file.
      ValueError: for a file that is no GGUF, is cut off, is one of several parts of a model, or has its bytes
        in the order of another machine.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._package = _needed("gguf")
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
        # Of such a file gguf swaps the numbers of the header, and not those of arrays.
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
        """Metadata: a number, a text, or a list of them. ValueError if there is none of that name."""
        if key not in self._fields:
            raise ValueError(f"{self.path} must hold {key!r}, and does not: use another file")
        return self._fields[key].contents()

    def get(self, key: str, default: Any) -> Any:
        """Metadata, or `default` where there is none."""
        return self[key] if key in self._fields else default

    def names(self) -> Iterator[str]:
        """Of the arrays."""
        return iter(self._tensors)

    def array(self, name: str) -> np.ndarray:
        """An array as float32 numbers, dequantised; of a matrix the rows are outputs.

        Raises:
          ValueError: if there is none of that name, or its quantisation is not known.
        """
        if name not in self._tensors:
            raise ValueError(f"{self.path} must hold the array {name!r}: use another file")
        tensor = self._tensors[name]
        try:
            found = self._package.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.path} holds {name!r} as {tensor.tensor_type.name}, which gguf does not decode: "
                "use a file with another quantisation, such as Q8_0"
            ) from None
        return np.asarray(found, np.float32)


class Tokenizer:
    """A byte-level BPE tokenizer. Any text is encoded, and names of control tokens in it are only text.

    Attributes:
      vocab_size: M.
      start: The token that goes before a text: <|endoftext|>, which separates texts in pretraining, or the
        file's token for the beginning of a sequence.
    """

    def __init__(self, tokenizer: Any, start: int):
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=False)
        self.start = start

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, int32."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.asarray(one.ids, np.int32) for one in encoded]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def tokenizer(file: GGUF) -> Tokenizer:
    """The tokenizer that a file holds.

    Raises:
      ModuleNotFoundError: without the package tokenizers.
      ValueError: for a file without a tokenizer, one of another kind than byte-level BPE, one that does not
        say how it cuts texts into words, or merges or a first token that are not in its vocabulary.
    """
    package = _needed("tokenizers")
    kind = file.get("tokenizer.ggml.model", None)
    if kind != "gpt2":
        raise ValueError(
            f"{file.path} must hold a byte-level BPE tokenizer ('gpt2'), and has {kind!r}: use another file"
        )
    if "tokenizer.ggml.pre" not in file:
        raise ValueError(
            f"{file.path} must say how its tokenizer cuts texts into words, and has no tokenizer.ggml.pre, "
            "as files of old converters: convert the model again, or add what it was trained with by "
            f"gguf-new-metadata --pre-tokenizer, one of {', '.join(_WORDS)}"
        )
    name = file["tokenizer.ggml.pre"]
    if name not in _WORDS:
        raise ValueError(
            f"{file.path} cuts texts into words as {name!r} does: use a file of {', '.join(_WORDS)}"
        )
    tokens = file["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in file["tokenizer.ggml.merges"]]
    try:
        model = package.models.BPE(
            vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"
        )
    except Exception as error:  # tokenizers raises no class of its own
        raise ValueError(
            f"{file.path} holds merges that do not fit its vocabulary "
            f"({str(error).splitlines()[0]}): fetch it again"
        ) from None
    built = package.Tokenizer(model)
    parts = package.pre_tokenizers
    built.pre_tokenizer = parts.Sequence(
        [
            *(parts.Split(package.Regex(words), "isolated") for words in _WORDS[name]),
            parts.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = package.decoders.ByteLevel()
    start = vocabulary.get(_SEPARATOR)
    if start is None:
        start = file["tokenizer.ggml.bos_token_id"]
    if start >= len(tokens):
        raise ValueError(
            f"{file.path} begins texts with token {start} of {len(tokens)}, which it has not: fetch it again"
        )
    return Tokenizer(built, start)


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f'GGUF files need the package {name}: in the clone of dpx, pip install -e ".[lm]"',
            name=name,
        ) from None
