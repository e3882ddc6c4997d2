"""Public embeddings of documents: unit vectors computed from words, fitted on a public corpus.

The method is latent semantic analysis: TF-IDF weights, projected on the leading singular vectors of the
public corpus (Deerwester et al., 1990). A private document is embedded by itself, so that its vector depends
on no other private document. The mean of the corpus is subtracted, and directions of large variance are
shrunk, since neither helps to tell documents apart.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from dpx._storage import replacing
from dpx._validate import check_integer
from dpx.data.newsgroups import DocumentFrequencies, document_frequencies, tokenize


class Projection(NamedTuple):
    """A public map from vectors to unit vectors of fewer dimensions, fitted on public vectors.

    Attributes:
      centre: (d,), the mean of the public vectors, each scaled to length 1.
      directions: (d, dim), along which they vary most; those of large variance are shrunk.
    """

    centre: np.ndarray
    directions: np.ndarray

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Unit vectors (n, dim) float32 of vectors (n, d); zero stays zero."""
        known = np.linalg.norm(rows, axis=1, keepdims=True) > 0
        # Summed row by row, since the rounding of a matrix product depends on the number of rows.
        shrunk = np.einsum("nd,de->ne", _unit(rows) - self.centre, self.directions)
        return (_unit(shrunk) * known).astype(np.float32)


def fit_projection(public: np.ndarray, dim: int) -> Projection:
    """The projection on the `dim` directions along which public vectors (n, d) vary most.

    Half of a whitening divides by the fourth roots of the variances, not by their square roots.

    Raises:
      ValueError: for more dimensions than d, or than there are public vectors to tell apart.
    """
    dim = check_integer(dim, "dim")
    if dim > public.shape[1] or dim >= len(public):
        raise ValueError(
            f"dim={dim} must be at most the {public.shape[1]} dimensions of the vectors and less than the "
            f"{len(public)} public ones: use fewer dimensions or a larger corpus"
        )
    rows = _unit(public.astype(np.float64))
    centre = rows.mean(0)
    variances, axes = np.linalg.eigh(np.cov((rows - centre).T).reshape(2 * (rows.shape[1],)))
    variances, axes = variances[-dim:], axes[:, -dim:]
    return Projection(centre, axes * np.maximum(variances, 1e-12) ** -0.25)


class Embedding(NamedTuple):
    """A public map from texts to unit vectors.

    Attributes:
      frequencies: The words of the vocabulary, and the number of public documents with each.
      directions: (words, dim), the leading singular vectors, in the order of `frequencies`.
      projection: Of what these make of a text, which keeps all of its dimensions.
    """

    frequencies: DocumentFrequencies
    directions: np.ndarray
    projection: Projection

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """The embeddings (n, dim) float32, of length 1, or 0 for a text without a known word."""
        return self.projection(_weights(texts, self.frequencies) @ self.directions)

    def save(self, path: Path) -> None:
        """Writes it to an .npz file, which `load_embedding` reads."""
        counts, num_documents = self.frequencies
        numbers = np.array([*counts.values(), num_documents])
        with replacing(path) as file:
            np.savez(
                file,
                words=np.array(list(counts)),
                numbers=numbers,
                directions=self.directions,
                centre=self.projection.centre,
                whitening=self.projection.directions,
            )


def fit_embedding(
    public_texts: Sequence[str], dim: int, *, min_documents: int = 3, max_share: float = 0.1
) -> Embedding:
    """The embedding of a public corpus.

    Args:
      public_texts: Public documents; nothing here is private.
      dim: The number of singular vectors.
      min_documents, max_share: Words in fewer documents, or a larger share of them, are left out.

    Raises:
      ValueError: for a corpus with fewer than dim + 1 documents or words.
    """
    dim = check_integer(dim, "dim")
    corpus = document_frequencies(public_texts, min_documents=min_documents)
    most = max_share * corpus.num_documents
    kept = {word: count for word, count in corpus.counts.items() if count <= most}
    frequencies = DocumentFrequencies(kept, corpus.num_documents)
    if min(len(kept), len(public_texts)) <= dim:
        raise ValueError(
            f"dim={dim} must be less than the {len(public_texts)} documents and the {len(kept)} words of the "
            "public corpus: use fewer dimensions or a larger corpus"
        )
    weights = _weights(public_texts, frequencies)
    start = np.random.default_rng(0).normal(size=min(len(public_texts), len(kept)))
    directions = np.asarray(linalg.svds(weights, k=dim, v0=start)[2])
    return Embedding(frequencies, directions.T, fit_projection(weights @ directions.T, dim))


def load_embedding(path: Path) -> Embedding:
    """What `Embedding.save` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        *counts, num_documents = arrays["numbers"].tolist()
        words = arrays["words"].tolist()
        directions = arrays["directions"]
        projection = Projection(arrays["centre"], arrays["whitening"])
    frequencies = DocumentFrequencies(dict(zip(words, counts, strict=True)), num_documents)
    return Embedding(frequencies, directions, projection)


def _weights(texts: Sequence[str], frequencies: DocumentFrequencies) -> sparse.csr_matrix:
    """The TF-IDF scores of each text, (n, words), in unit rows; a word that occurs k times has 1 + log k."""
    column = {word: number for number, word in enumerate(frequencies.counts)}
    cells = [
        (row, column[word], (1 + np.log(count)) * frequencies.idf(word))
        for row, text in enumerate(texts)
        for word, count in Counter(tokenize(text)).items()
        if word in column
    ]
    rows, columns, values = zip(*cells, strict=True) if cells else ((), (), ())
    shape = len(texts), len(column)
    weights = sparse.csr_matrix((values, (rows, columns)), shape=shape, dtype=np.float64)
    lengths = np.sqrt(np.asarray(weights.multiply(weights).sum(1)).ravel())
    return sparse.diags(1 / np.where(lengths > 0, lengths, 1)) @ weights


def _unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)
