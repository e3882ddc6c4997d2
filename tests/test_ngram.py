import math
import tracemalloc
from collections import Counter

import jax
import numpy as np
import pytest

import dpx
from dpx import ngram
from dpx.data import cells, surnames
from dpx.noise import secure
from dpx.privacy import ADD_OR_REMOVE_ONE
from dpx.release import merge

NAMES = surnames.encode(["anna", "anton", "bo", "aaaaaaaaaaaaa", "zoe"])


def fit(names=NAMES, **changes):
    settings = {
        "order": 2,
        "vocab_size": 27,
        "start": surnames.END,
        "epsilon": 1e8,
        "delta": 1e-5,
        "unit": "name",
        "l2_clip_norm": 100.0,
    }
    return ngram.fit(jax.random.key(0), names.tokens, names.mask, **(settings | changes))


@pytest.mark.quick_cases("3")
@pytest.mark.parametrize("order", [1, 2, 3])
def test_counts_without_noise_are_the_counts(order, monkeypatch):
    released = {}
    monkeypatch.setattr(ngram, "_smooth", lambda noisy, *_: released.setdefault("noisy", noisy))
    fit(order=order)
    expected = Counter()
    for name in surnames.decode(NAMES.tokens):
        letters = [surnames.END] * (order - 1) + [ord(c) - 97 for c in name] + [surnames.END]
        for i in range(len(name) + 1):
            expected[tuple(letters[i : i + order])] += 1
    counts = np.rint(released["noisy"].reshape((27,) * order))
    assert {cell: int(counts[cell]) for cell in zip(*np.nonzero(counts), strict=True)} == expected


@pytest.mark.parametrize("order", [1, 2, 3])
def test_one_name_moves_the_counts_by_at_most_the_clip(order, monkeypatch):
    monkeypatch.setattr(ngram, "_smooth", lambda noisy, *_: noisy)

    def counts(names):
        return fit(names, order=order, l2_clip_norm=1.5).probabilities

    base = counts(NAMES)
    for extra in ("q", "aaaaaaaaaaaaa", "abcdefghijklm", "anna"):
        more = surnames.encode([*surnames.decode(NAMES.tokens), extra])
        assert np.linalg.norm(counts(more) - base) <= 1.5 * (1 + 1e-6)  # and a step of the grid
    alone = counts(surnames.encode(["aaaaaaaaaaaaa"]))
    assert np.linalg.norm(alone) == pytest.approx(1.5, rel=0.02)


@pytest.mark.slow
def test_probabilities_are_probabilities_and_learn():
    names = surnames.encode(surnames.load_surnames()[:5000])
    for epsilon in (0.1, 3.0, 1e8):
        model = fit(names, order=3, epsilon=epsilon, l2_clip_norm=2.0)
        np.testing.assert_allclose(model.probabilities.sum(axis=1), 1)
        assert model.probabilities.min() > 0
    uniform = np.log(27)
    nats = [
        -fit(names, order=n, epsilon=3.0, l2_clip_norm=2.0)
        .log_prob(names.tokens)[names.mask]
        .mean()
        for n in (1, 2, 3)
    ]
    assert uniform > nats[0] > nats[1] > nats[2] > 1.5


def test_the_guarantee_is_that_of_one_gaussian_release():
    guarantee = fit(epsilon=2.0, unit="word").guarantee
    assert guarantee.unit == "word"
    assert guarantee.neighboring is ADD_OR_REMOVE_ONE
    multiplier = dpx.gaussian_noise_multiplier(2.0, 1e-5)
    assert (guarantee.epsilon, guarantee.event.noise_multiplier) == (2.0, multiplier)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("clip", [0.5, 3.0, 100.0])
def test_counts_are_those_of_one_record_after_the_other(order, clip):
    """The same integers as a dictionary for each record gives, whatever records stand beside it."""
    rng = np.random.default_rng(order)
    lengths = [0, 1, 40, 3, 40, 17, 1]
    mask = np.arange(40) < np.array(lengths)[:, None]
    # Few tokens in some records, so that cells occur often, and many in others.
    tokens = np.stack([rng.integers(0, most, 40) for most in (5, 5, 1, 2, 5, 3, 5)])
    expected = np.zeros(5**order, np.int64)
    for row, length in zip(tokens.tolist(), lengths, strict=True):
        padded = [4] * (order - 1) + row[:length]
        own = Counter(tuple(padded[i : i + order]) for i in range(length))
        norm = math.sqrt(sum(count**2 for count in own.values()))
        weight = min(1, clip / max(norm, 1))
        for gram, count in own.items():
            cell = np.ravel_multi_index(gram, (5,) * order)
            expected[cell] += round(min(1, count * weight / clip) * secure.STEPS)
    table = {"order": order, "vocab_size": 5, "start": 4, "l2_clip_norm": clip}
    found = ngram.statistic((tokens, mask), **table)
    np.testing.assert_array_equal(found.sums[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [1.5, 100.0])
def test_counts_of_a_user_are_clipped_together(clip):
    """The integers of a dictionary for each user, whatever their numbers, and wherever their rows lie."""
    rng = np.random.default_rng(0)
    users = np.array([7, 2, 7, 2**40, 2, 7, 7, 2**40])
    mask = np.arange(12) < np.array([12, 1, 5, 12, 0, 3, 9, 2])[:, None]
    tokens = rng.integers(0, 4, (8, 12))
    own = {user: Counter() for user in users.tolist()}
    for user, row, kept in zip(users.tolist(), tokens, mask, strict=True):
        padded = [3, *row[kept].tolist()]
        own[user].update((padded[i], padded[i + 1]) for i in range(kept.sum()))
    expected = np.zeros(16, np.int64)
    for counts in own.values():
        norm = math.sqrt(sum(count**2 for count in counts.values()))
        for gram, count in counts.items():
            value = min(1, count * min(1, clip / max(norm, 1)) / clip)
            expected[np.ravel_multi_index(gram, (4, 4))] += round(value * secure.STEPS)
    table = {"order": 2, "vocab_size": 4, "start": 3, "l2_clip_norm": clip}
    found = ngram.statistic((tokens, mask, users), **table)
    np.testing.assert_array_equal(found.sums[0], expected)
    assert found.num_records == 3
    order = rng.permutation(8)
    moved = ngram.statistic((tokens[order], mask[order], users[order]), **table)
    np.testing.assert_array_equal(moved.sums[0], expected)
    for gone in own:
        rest = users != gone
        less = ngram.statistic((tokens[rest], mask[rest], users[rest]), **table)
        change = np.linalg.norm((found.sums[0] - less.sums[0]).astype(float))
        assert change <= found.largest
    released = ngram.fit(
        jax.random.key(0), tokens, mask, users=users, **table, epsilon=1e8, delta=1e-5, unit="user"
    )
    assert released.guarantee.unit == "user"
    of_sum = ngram.fit(
        jax.random.key(0), found, None, **table, epsilon=1e8, delta=1e-5, unit="user"
    )
    assert released.guarantee == of_sum.guarantee
    assert released.guarantee.assumptions == (cells.ONE_EACH,)
    with pytest.raises(ValueError, match="same options"):  # a user who is in both counts twice
        merge(found.as_block("a"), ngram.statistic((tokens, mask), **table).as_block("b"))
    with pytest.raises(ValueError, match=r"users of shape \(7,\)"):
        ngram.statistic((tokens, mask, users[1:]), **table)
    hidden = np.ma.masked_equal(users, 2)  # under the mask they would be one user, whoever they are
    with pytest.raises(ValueError, match="users is a masked array"):
        ngram.statistic((tokens, mask, hidden), **table)


def test_memory_grows_with_the_tokens_and_not_with_the_square_of_a_length():
    """The table of which positions of a record are equal would be 400 MB here."""
    tokens = np.random.default_rng(0).integers(0, 27, (100, 2000))
    table = {"order": 2, "vocab_size": 28, "start": 27}
    tracemalloc.start()
    ngram.statistic((tokens, np.ones(tokens.shape, bool)), **table)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 150 * tokens.size


@pytest.mark.parametrize("order", [1, 2])
def test_what_fills_a_row_does_not_count(order):
    """Also where the clip takes a part of the counts: padding must not make a record longer."""
    table = {"order": order, "vocab_size": 27, "start": surnames.END, "l2_clip_norm": 1.5}
    wide = [np.pad(part, ((0, 0), (0, 7))) for part in (NAMES.tokens, NAMES.mask)]
    found = ngram.statistic((NAMES.tokens, NAMES.mask), **table), ngram.statistic(wide, **table)
    np.testing.assert_array_equal(found[0].sums[0], found[1].sums[0])


def test_smoothing_is_told_the_noise_of_a_cell(monkeypatch):
    monkeypatch.setattr(ngram, "_smooth", lambda noisy, order, vocab_size, std: std)
    multiplier = dpx.gaussian_noise_multiplier(2.0, 1e-5)
    assert fit(epsilon=2.0, l2_clip_norm=3.0).probabilities == pytest.approx(3 * multiplier)


def test_noise_of_shorter_contexts_is_that_of_a_sum():
    """Four cells of 3/8 of a standard deviation count for nothing one by one, and half of one together."""
    table = np.zeros((4, 4))
    table[:, 0] = 3 / 8
    found = ngram._smooth(table.ravel(), 2, 4, 1.0)
    np.testing.assert_allclose(found[:, 0], (0.5 + 40 / 4) / (0.5 + 40))


OPTIONS = {"order": 2, "vocab_size": 4, "start": 0, "l2_clip_norm": 1.0}
TOKENS, KEPT = np.array([[0, 3, 0]]), np.ones((1, 3), bool)


def check_refused(named, tokens=TOKENS, mask=KEPT, **changes):
    """Checks the error of each of the functions that count."""
    options = OPTIONS | changes
    with pytest.raises(ValueError, match=named):
        ngram.statistic((tokens, mask), **options)
    del options["l2_clip_norm"]
    with pytest.raises(ValueError, match=named):
        ngram.without_privacy(tokens, mask, **options)


@pytest.mark.parametrize("token", [-1, 4, 300])
def test_tokens_outside_the_vocabulary_are_refused(token):
    """Index -1 is that of the last cell too: both would be counted there, as two entries of one record."""
    tokens, mask = np.array([[3, token]]), np.ones((1, 2), bool)
    check_refused(r"tokens must be in \[0, 4\)", tokens, mask)
    model = fit(order=1, vocab_size=27)
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 27\)"):
        model.log_prob(np.array([[3, 27 if token > 0 else token]]))
    # Where the mask is False they are padding, whatever they are.
    padded = ngram.statistic((tokens, np.array([[True, False]])), **OPTIONS)
    alone = ngram.statistic((tokens[:, :1], mask[:, :1]), **OPTIONS)
    np.testing.assert_array_equal(padded.sums[0], alone.sums[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("start", -1), ("start", 4), ("order", 0), ("order", 1.5), ("order", 40), ("vocab_size", 0)],
)
def test_tables_that_are_none_are_refused_in_a_block_too(name, value):
    """With the start -1 two cells of one record would be the same, which moves a count by two."""
    check_refused(name, **{name: value})


@pytest.mark.parametrize(
    ("tokens", "mask", "named"),
    [
        (np.array([[0.5, 1.0, 1.0]]), KEPT, "tokens of dtype"),
        (np.array([["a", "b", "c"]]), KEPT, "tokens has dtype"),
        (TOKENS, np.ones((1, 3), int), "must be bool"),
        *(
            (np.zeros(one, int), np.ones(other, bool), "tokens and mask have shapes")
            for one, other in (
                ((2, 0), (2, 0)),
                ((4,), (4,)),
                ((2, 2, 2), (2, 2, 2)),
                ((2, 4), (4,)),
            )
        ),
        # Padding has the number of some token, which would be the context of the next one.
        (TOKENS, np.array([[False, True, True]]), "mask must be True at a prefix of each row"),
        (TOKENS, np.array([[True, False, True]]), "mask must be True at a prefix of each row"),
    ],
)
def test_tokens_and_mask_are_one_matrix_each(tokens, mask, named):
    check_refused(named, tokens, mask)
