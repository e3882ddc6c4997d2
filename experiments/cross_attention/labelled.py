"""Documents with a label, as unit vectors that a public corpus defines: private ones, and others that ask."""

from typing import NamedTuple

import numpy as np

from dpx._validate import check_integer
from dpx.data.embedding import Embedding, fit_embedding
from dpx.data.newsgroups import load_labelled
from experiments.dp_transformer.documents import newsgroups_table


class Documents(NamedTuple):
    """Private keys (n, dim) and labels (n,), those of held-out documents, and what is public.

    Attributes:
      public: Keys of the public corpus.
      embedding: Which makes keys of texts.
      names: Of the groups, by their numbers.
    """

    keys: np.ndarray
    labels: np.ndarray
    queries: np.ndarray
    truth: np.ndarray
    num_groups: int
    public: np.ndarray
    embedding: Embedding | None = None
    names: tuple[str, ...] = ()


def check(config) -> None:
    """Raises ValueError for a section `data`, `dim` or `num_groups` that cannot be used."""
    for name in ("dim", "num_groups"):
        check_integer(config[name], f"config.{name}")
    check_integer(config.data.generated, "config.data.generated", 0)
    if (config.data.path is None) != (config.data.public_path is None):
        raise ValueError(
            "config.data.path and config.data.public_path belong together: give the private documents and "
            "those of which one half is the public corpus and the other asks"
        )
    if not config.data.generated:
        _paths(config)


def _paths(config) -> tuple[str, str]:
    if config.data.path is not None:
        return config.data.path, config.data.public_path
    private, public = (str(newsgroups_table(half)) for half in ("train", "test"))
    return private, public


def load(config) -> Documents:
    """Of the later documents one half, without labels, is the public corpus, and the other one asks."""
    if config.data.generated:
        texts, groups = _generated(2 * config.data.generated, np.random.default_rng(config.seed))
        half = config.data.generated
        private, later = (texts[:half], groups[:half]), (texts[half:], groups[half:])
    else:
        private, later = (load_labelled(path) for path in _paths(config))
    order = np.random.default_rng(config.seed).permutation(len(later[0]))
    public, asking = np.array_split(order, 2)
    embedding = fit_embedding([later[0][i] for i in public], config.dim)
    names = sorted(set(later[1]))  # of public documents
    if len(names) != config.num_groups:
        raise ValueError(
            f"config.num_groups={config.num_groups} must be the {len(names)} groups of the public documents"
        )
    number = {name: i for i, name in enumerate(names)}
    kept = [i for i, group in enumerate(private[1]) if group in number]
    return Documents(
        embedding([private[0][i] for i in kept]),
        np.array([number[private[1][i]] for i in kept]),
        embedding([later[0][i] for i in asking]),
        np.array([number[later[1][i]] for i in asking]),
        len(names),
        embedding([later[0][i] for i in public]),
        embedding,
        tuple(names),
    )


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
