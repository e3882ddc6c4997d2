"""What `features="auto"` makes of labelled memories, next to a constant and the best of some fixed features.

    python -m experiments.bench.memories [--rows=1000,5000] [--epsilons=1,3]

Keys are unit vectors, values one-hot labels. Of `clusters` each label has a centre, which other directions
blur as much as it weighs. `texts` are documents in which one word of four is of their label, embedded as in
the retrieval classifier (`dpx.data.embedding`). Prints the share of 500 other keys of which the largest entry
of the answer is the label, mean of two draws of the noise, and degree and scale in brackets.
"""

import warnings

import jax
import numpy as np
from absl import app, flags

from dpx import cross_attention
from dpx.cross_attention import MemoryWarning
from dpx.data.embedding import fit_embedding
from dpx.runs import cli

_ROWS = flags.DEFINE_list("rows", ["1000", "5000"], "rows of a memory")
_EPSILONS = flags.DEFINE_list("epsilons", ["1", "3"], "ε")
_SIZES = ((16, 5), (64, 20))  # d and the number of labels
_SCALES = (0.25, 0.5, 1.0, 2.0)
_QUERIES = 500
_BOUNDS = {"key_bound": 1.0, "value_bound": 1.0, "domain": "ball", "value_domain": "simplex"}


def clusters(rng, count: int, dim: int, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys (count, dim) and labels (count,)."""
    centres = rng.normal(size=(labels, dim))
    of = rng.integers(labels, size=count)
    keys = centres[of] + rng.normal(size=(count, dim))
    return keys / np.linalg.norm(keys, axis=1, keepdims=True), of


def texts(rng, count: int, dim: int, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of made-up documents, with an embedding that 1,000 further ones define."""
    of = rng.integers(labels, size=1000 + count)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(word) for word in rng.choice(letters, (3000, 6))])
    common = 1 / np.arange(1, 2001)
    documents = []
    for label in of:
        own = words[2000 + rng.integers(50, size=15) + 50 * label]
        rest = words[rng.choice(2000, 45, p=common / common.sum())]
        documents.append(" ".join([*own, *rest]))
    embedding = fit_embedding(documents[:1000], dim)
    return embedding(documents[1000:]), of[1000:]


def measured(keys, own, rows: int, labels: int, epsilon: float, **options):
    """The accuracy on what is beyond the first `rows`, and the features."""
    values, shares, built = np.eye(labels)[own[:rows]], [], None
    for seed in range(2):
        built = cross_attention.build(
            jax.random.key(seed),
            keys[:rows],
            values,
            epsilon=epsilon,
            delta=1e-5,
            clip=True,
            **_BOUNDS,
            **options,
        )
        found = np.asarray(built.query(keys[rows:])).argmax(axis=1)
        shares.append((found == own[rows:]).mean())
    assert built is not None
    about = getattr(built.features, "degree", "random")
    return float(np.mean(shares)), f"({about}, {built.domain.scale:g})"


def main(argv: list[str]) -> None:
    del argv
    warnings.simplefilter("ignore", MemoryWarning)
    print("| data | n | d | labels | ε | constant | auto | best fixed |")
    print("|---|---|---|---|---|---|---|---|")
    for draw in (clusters, texts):
        for dim, labels in _SIZES:
            for rows in map(int, _ROWS.value):
                rng = np.random.default_rng(rows)
                keys, own = draw(rng, rows + _QUERIES, dim, labels)
                for epsilon in map(float, _EPSILONS.value):
                    about = keys, own, rows, labels, epsilon
                    constant, _ = measured(*about, degree=0)
                    auto, chosen = measured(*about, features="auto")
                    best, fixed = max(measured(*about, degree=2, scale=scale) for scale in _SCALES)
                    print(
                        f"| {draw.__name__} | {rows:,} | {dim} | {labels} | {epsilon:g} | {constant:.3f} "
                        f"| {auto:.3f} {chosen} | {best:.3f} {fixed} |",
                        flush=True,
                    )


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
