"""Documents with a label, as unit vectors that a public corpus defines: private ones, and others that ask."""

from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from dpx._storage import replacing
from dpx._validate import check_integer
from dpx.data.embedding import Projection, fit_embedding, fit_projection, load_embedding
from dpx.data.text import load_texts
from experiments.dp_transformer import classifier, labelled_texts
from experiments.dp_transformer.documents import newsgroups_table
from experiments.dp_transformer.labelled_texts import Labelled


class TextEmbedding(Protocol):
    """A public map from texts to unit vectors (n, dim)."""

    def __call__(self, texts: Sequence[str]) -> np.ndarray: ...

    def save(self, path: Path) -> None: ...


class Documents(NamedTuple):
    """Private keys (n, dim) and labels (n,), those of held-out documents, and what is public.

    Attributes:
      public: Keys of the public corpus.
      embedding: Which makes keys of texts.
      names: Of the groups, by their numbers.
      texts: Of the documents that ask.
      public_texts: Of the public corpus.
    """

    keys: np.ndarray
    labels: np.ndarray
    queries: np.ndarray
    truth: np.ndarray
    num_groups: int
    public: np.ndarray
    embedding: TextEmbedding | None = None
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    public_texts: tuple[str, ...] = ()


class Encoded(NamedTuple):
    """A public map from texts to unit vectors: the features of a pretrained encoder, projected.

    Attributes:
      features: Of texts, (n, d); they are computed text by text.
      projection: Which the features of public texts define.
    """

    features: Callable[[Sequence[str]], np.ndarray]
    projection: Projection

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return self.projection(self.features(texts))

    def save(self, path: Path) -> None:
        """Writes the projection to an .npz file; the encoder is that of the config."""
        with replacing(path) as file:
            np.savez(file, **self.projection._asdict())


def check(config) -> None:
    """Raises ValueError for a section `data`, `dim` or `num_groups` that cannot be used."""
    check_integer(config.dim, "config.dim")
    if encodes(config):
        labelled_texts.check(config)
        if config.data.user is not None:
            raise ValueError(
                f"config.data.user={config.data.user!r} must be left out: a text is a row of the memory, and "
                "the unit"
            )
        if config.data.kind == "table" and config.data.test_path is None:
            raise ValueError(
                "config.data.test_path is missing: give later texts, of which one half is no secret and "
                "defines the keys, and the other asks; those of config.data.path are private"
            )
        classifier.check(classifier.untuned(config))
        width = len(classifier.kept_build(classifier.untuned(config)).center)
        if config.dim > width:
            raise ValueError(
                f"config.dim={config.dim} must be at most {width}, the width of the encoder"
            )
        _check_public(config)
        return
    check_integer(config.num_groups, "config.num_groups")
    check_integer(config.data.generated, "config.data.generated", 0)
    if (config.data.path is None) != (config.data.public_path is None):
        raise ValueError(
            "config.data.path and config.data.public_path belong together: give the private documents and "
            "those of which one half is the public corpus and the other asks"
        )
    _check_public(config)


def _check_public(config) -> None:
    _, later, _ = _texts(config)
    if config.dim >= (public := len(halves(config, later)[0])):
        raise ValueError(
            f"config.dim={config.dim} must be less than {public}, the number of public texts, which are one "
            "half of the later ones: use fewer dimensions, or give more texts"
        )


def encodes(config) -> bool:
    """Whether keys are features of a pretrained encoder, and not weights of words."""
    return "model" in config


def size(config) -> tuple[int, int]:
    """How many private documents there are, and how many ask."""
    private, later, _ = _texts(config)
    return len(private), len(halves(config, later)[1])


def load(config) -> Documents:
    """Of the later documents one half, without labels, is the public corpus, and the other one asks."""
    private, later, names = _texts(config)
    public, asking = (later.take(part) for part in halves(config, later))
    if encodes(config):
        features = classifier.features_of(classifier.untuned(config))
        embedding = Encoded(features, fit_projection(features(list(public.texts)), config.dim))
    else:
        embedding = fit_embedding(list(public.texts), config.dim)
    return Documents(
        embedding(list(private.texts)),
        private.labels,
        embedding(list(asking.texts)),
        asking.labels,
        len(names),
        embedding(list(public.texts)),
        embedding,
        names,
        tuple(asking.texts),
        tuple(public.texts),
    )


def load_public(config, path: Path) -> TextEmbedding:
    """The embedding that `save` wrote."""
    if not encodes(config):
        return load_embedding(path)
    with np.load(path, allow_pickle=False) as arrays:
        return Encoded(
            classifier.features_of(classifier.untuned(config)),
            Projection(*(arrays[n] for n in Projection._fields)),
        )


def public_files(config) -> list[np.ndarray]:
    """The bytes of the encoder's files."""
    return classifier.model_files(config) if encodes(config) else []


def num_groups(config) -> int:
    """How many groups there are, which is public."""
    return len(config.data.labels) if encodes(config) else config.num_groups


def synthetic(config) -> bool:
    """Whether nobody wrote the documents."""
    if encodes(config):
        return config.data.kind == "generated"
    return bool(config.data.generated)


def halves(config, later: Sized) -> list[np.ndarray]:
    """Which of the later documents are the public corpus, and which ask."""
    return np.array_split(np.random.default_rng(config.seed).permutation(len(later)), 2)


def _texts(config) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Private and later documents, and the names of the groups."""
    if encodes(config):
        return *labelled_texts.load(config), tuple(config.data.labels)
    if config.data.generated:
        texts, groups = _generated(2 * config.data.generated, np.random.default_rng(config.seed))
        half = config.data.generated
        private, later = (texts[:half], groups[:half]), (texts[half:], groups[half:])
    else:
        private, later = (_table(config, path) for path in _paths(config))
    public, _ = halves(config, later[1])
    names = sorted({later[1][row] for row in public})
    if len(names) != config.num_groups:
        raise ValueError(
            f"config.num_groups={config.num_groups} must be the {len(names)} groups of the public documents"
        )
    number = {name: i for i, name in enumerate(names)}
    # One that asks may be of another group, which no answer is.
    of_later = np.array([number.get(group, -1) for group in later[1]])
    asking = Labelled(np.array(later[0], object), of_later, None)
    return _numbered(*private, number), asking, tuple(names)


def _table(config, path: str) -> tuple[list[str], list[str]]:
    """The documents of a table, and the group of each."""
    found = list(load_texts(path, column=config.data.column, label="Category"))
    return [one.text for one in found], [str(one.label) for one in found]


def _numbered(texts: list[str], groups: list[str], number: dict[str, int]) -> Labelled:
    """The documents of the groups that have a number."""
    kept = [i for i, group in enumerate(groups) if group in number]
    found = np.array([texts[i] for i in kept], object)
    return Labelled(found, np.array([number[groups[i]] for i in kept]), None)


def _paths(config) -> tuple[str, str]:
    if config.data.path is not None:
        return config.data.path, config.data.public_path
    private, public = (str(newsgroups_table(half)) for half in ("train", "test"))
    return private, public


def _generated(count: int, rng) -> tuple[list[str], list[str]]:
    """Documents of four groups, each with words of its own among common ones."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [a + b for a in letters for b in letters]
    texts, groups = [], []
    for group in rng.integers(4, size=count):
        own = rng.integers(60, size=12) + 60 * group
        common = 240 + rng.integers(400, size=12)
        texts.append(" ".join(words[i] for i in np.concatenate([own, common])))
        groups.append("abcd"[group])
    return texts, groups
