"""Public embeddings: unit vectors that depend on the public corpus and on their own text alone."""

import numpy as np
import pytest
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from dpx.data import embedding
from dpx.data.embedding import fit_embedding, load_embedding

WORDS = [a + b for a in "abcdefgh" for b in "klmnopqr"]


def corpus(count, seed=0):
    rng = np.random.default_rng(seed)
    halves = rng.integers(2, size=count)
    pieces = [rng.choice(WORDS[32 * half : 32 * half + 40], 15) for half in halves]
    return [" ".join(piece) for piece in pieces], halves


def test_directions_are_those_of_an_independent_implementation():
    texts, _ = corpus(200)
    ours = fit_embedding(texts, 5, min_documents=1, max_share=1.0)
    theirs = TfidfVectorizer(sublinear_tf=True)
    weights = theirs.fit_transform(texts)
    assert set(theirs.vocabulary_) == set(ours.frequencies.counts)
    svd = TruncatedSVD(5, algorithm="arpack").fit(weights)
    order = [theirs.vocabulary_[word] for word in ours.frequencies.counts]
    projections = [rows.T @ rows for rows in (svd.components_[:, order], ours.directions.T)]
    np.testing.assert_allclose(*projections, atol=1e-6)


def test_a_file_has_the_names_that_earlier_ones_have_and_gives_the_same_vectors(tmp_path):
    texts, _ = corpus(100)
    ours = fit_embedding(texts, 4, min_documents=1, max_share=1.0)
    ours.save(tmp_path / "embedding.npz")
    with np.load(tmp_path / "embedding.npz") as arrays:
        assert set(arrays) == {"words", "numbers", "directions", "centre", "whitening"}
        assert arrays["directions"].shape == (len(ours.frequencies.counts), 4)
    read = load_embedding(tmp_path / "embedding.npz")
    np.testing.assert_array_equal(read(texts), ours(texts))


def test_vectors_are_unit_vectors_of_their_own_text_alone():
    texts, halves = corpus(300)
    embed = fit_embedding(texts[:200], 4, min_documents=1, max_share=1.0)
    private = [*texts[200:], "", "zzz yyy"]
    vectors = embed(private)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1.0] * 100 + [0.0] * 2, atol=1e-5)
    for row in (0, 57, 99):
        np.testing.assert_allclose(embed([private[row]])[0], vectors[row], atol=1e-6)
    means = [vectors[:100][halves[200:] == half].mean(0) for half in (0, 1)]
    right = (vectors[:100] @ np.stack(means).T).argmax(1) == halves[200:]
    assert right.mean() > 0.9
    public = embed(texts[:200])
    assert np.linalg.norm(public.mean(0)) < 0.2  # what they have in common is gone


def test_a_text_is_rounded_as_if_it_were_alone(monkeypatch):
    """In 64 bits: what is rounded otherwise there would show in 32 bits once in very many texts."""
    texts, _ = corpus(300)
    embed = fit_embedding(texts[:200], 48, min_documents=1, max_share=1.0)
    seen, unit = [], embedding._unit
    monkeypatch.setattr(embedding, "_unit", lambda rows: (seen.append(rows), unit(rows))[1])

    def before_the_last_bits_are_lost(some):
        embed(some)
        return seen[-1]

    together = before_the_last_bits_are_lost(texts[200:])
    alone = [before_the_last_bits_are_lost([text])[0] for text in texts[200:]]
    assert np.array_equal(together, alone)


def test_a_projection_is_half_a_whitening_on_the_leading_directions():
    """By singular vectors, which may have other signs: inner products have none."""
    rng = np.random.default_rng(0)
    public = rng.normal(size=(200, 6)) * [9, 5, 3, 2, 1, 0.1] + 1
    rows = public / np.linalg.norm(public, axis=1, keepdims=True)
    _, sizes, axes = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    other = (rows - rows.mean(0)) @ axes[:3].T / np.sqrt(sizes[:3])
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    found = embedding.fit_projection(public, 3)(np.concatenate([7 * public, np.zeros((1, 6))]))
    np.testing.assert_allclose(found[:-1] @ found[:-1].T, other @ other.T, atol=1e-5)
    np.testing.assert_array_equal(found[-1], 0)
    for dim, size in ((7, 200), (6, 6)):
        with pytest.raises(ValueError, match=f"dim={dim} must be at most the 6 dimensions"):
            embedding.fit_projection(public[:size], dim)


def test_a_small_corpus_is_refused():
    texts, _ = corpus(10)
    with pytest.raises(ValueError, match="dim=10 must be less than the 10 documents"):
        fit_embedding(texts, 10, min_documents=1)
