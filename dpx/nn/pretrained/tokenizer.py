"""Tokenizers: byte-level BPE of GGUF files, and all kinds that a tokenizer.json describes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpx.nn.pretrained.packages import needed

# Regular expressions that split a text into words, within which bytes are merged; by their names in files.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS = {"gpt-2": (_GPT2,), "smollm": (r"\p{N}", _GPT2), "llama-bpe": (_LLAMA3,)}
_SEPARATOR = "<|endoftext|>"


class Tokenizer:
    """A map from texts to tokens and back. Any text can be encoded; names of control tokens are plain text.

    Attributes:
      vocab_size: The number of tokens; the model's table may have more.
      start: The token before a text of a decoder: <|endoftext|>, which separates texts in pretraining, or the
        token for the beginning of a sequence. None if there is neither.
      marks: Whether the tokens that an encoder expects around a text, such as [CLS] and [SEP], are added.
    """

    def __init__(self, tokenizer: Any, start: int | None, *, marks: bool = False):
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=marks)
        self.start, self.marks = start, marks

    def encode(self, texts: list[str], length: int | None = None) -> list[np.ndarray]:
        """The tokens of each text, int32, at most `length` of them, marks included."""
        if length is None:
            self._tokenizer.no_truncation()
        else:
            self._tokenizer.enable_truncation(length)
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=self.marks)
        return [np.asarray(one.ids[:length], np.int32) for one in encoded]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        ids = [int(token) for token in tokens]
        return self._tokenizer.decode(ids, skip_special_tokens=self.marks)

    def save(self, path: Path) -> None:
        """Writes the tokenizer as a tokenizer.json."""
        self._tokenizer.save(str(path))


def padded(found: Sequence[np.ndarray], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of texts as an array (n, L) int32, padded with zeros at the end, and their mask (n, L).

    Args:
      found: The tokens of each text.
      length: L, by default that of the longest text; longer texts are cut.
    """
    longest = max(map(len, found), default=1)
    rows = [ids[:length] for ids in found]
    size = longest if length is None else length
    mask = np.arange(size) < np.array([len(ids) for ids in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


def from_json(path: Path, vocab_size: int, starts: Sequence[Any], *, marks: bool) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes.

    Args:
      path: The file.
      vocab_size: The number of tokens of the model.
      starts: Candidates for the token before a text, of which the first that exists is used, after
        <|endoftext|>.
      marks: Whether the tokens around a text are added.

    Raises:
      ModuleNotFoundError: without the package tokenizers.
      ValueError: for a file that is missing or damaged, or with more tokens than the model has.
    """
    package = needed("tokenizers", "Tokenizers")
    if not path.is_file():
        raise ValueError(f"{path} is missing: fetch it, or save the tokenizer as a fast one")
    try:
        built = package.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no class of its own
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} must be a tokenizer, and is not ({reason}): fetch it again"
        ) from None
    vocabulary = built.get_vocab(with_added_tokens=True)
    if (last := max(vocabulary.values(), default=-1)) >= vocab_size:
        raise ValueError(
            f"{path} has token {last}, and the model {vocab_size} tokens: it is the tokenizer "
            "of another model"
        )
    built.no_padding()
    built.encode_special_tokens = True  # names of control tokens in a text are only text
    numbers = [
        vocabulary.get(_SEPARATOR),
        *(x[0] if isinstance(x, list) and x else x for x in starts),
    ]
    known = (x for x in numbers if type(x) is int and 0 <= x < vocab_size)
    start = next(known, None)
    return Tokenizer(built, start, marks=marks)


def from_gguf(file: Any) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
      ModuleNotFoundError: without the package tokenizers.
      ValueError: for a file without a tokenizer, a tokenizer that is not byte-level BPE or does not say how
        it splits texts into words, or merges or a first token that are not in its vocabulary.
    """
    package = needed("tokenizers", "Tokenizers")
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
