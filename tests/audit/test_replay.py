"""Every public mechanism, replayed on neighbours: it moves by what it declares, and nothing else does."""

import functools
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from dpx import (
    audit,
    cross_attention,
    gram,
    ngram,
    noise,
    noisy_head,
    reattention,
    release,
)
from dpx.cross_attention import baselines
from dpx.data import Histories
from dpx.nn.cross_attention import PrivateCrossAttention
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee
from dpx.privacy.events import event_epsilon
from dpx.recommend import (
    item_gram,
    popularity,
    transitions,
)

KEY = jax.random.key(3)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
NUM_ITEMS = 9
pytestmark = pytest.mark.usefixtures("recording")


# ---------------------------------------------------------------------------------------------------------
# Adding or removing a record


def histories() -> list:
    rng = np.random.default_rng(0)
    users = [rng.integers(0, NUM_ITEMS, rng.integers(0, 7)).astype(np.int32) for _ in range(12)]
    longest = rng.integers(0, NUM_ITEMS, 60).astype(np.int32)
    return [*users[:5], longest, *users[5:], users[2], longest[:0]]


def of_histories(fit):
    return lambda users: fit(Histories(tuple(users), NUM_ITEMS))


TOKENS = 5


def of_tokens(fit):
    def program(users):
        length = max(map(len, users), default=0) or 1
        tokens, mask = np.zeros((len(users), 60), np.int32), np.zeros((len(users), 60), bool)
        for row, items in enumerate(users):
            tokens[row, : len(items)], mask[row, : len(items)] = items, True
        assert length <= 60
        return fit(tokens, mask)

    return program


def counted(order):
    return of_tokens(
        lambda tokens, mask: ngram.fit(
            KEY,
            tokens,
            mask,
            order=order,
            vocab_size=NUM_ITEMS,
            start=0,
            unit="name",
            **BUDGET,
        )
    )


def columns(users):
    """(NUM_ITEMS, n): a user's counts, a column each; the longest leaves the ball."""
    return np.stack([np.bincount(items, minlength=NUM_ITEMS) for items in users], 1).astype(float)


def of_rows(**options):
    """A memory with a row for each user who has items: counts of two items, and of three others."""
    options = {"key_bound": 1.0, "value_bound": 1.0, "clip": True, **BUDGET, **options}

    def program(users):
        counts = [np.bincount(items, minlength=NUM_ITEMS) for items in users if len(items)]
        rows = np.reshape(counts, (-1, NUM_ITEMS)).astype(float)
        return cross_attention.build(
            KEY, rows[:, :2] / 2, rows[:, 2:5] - 1, neighboring="add_or_remove_one", **options
        )

    return program


def over_blocks(fit):
    """A release over three blocks, one of them empty, as workers would sum them."""

    def program(users):
        cut = [users[:4], users[4:], users[:0]]
        blocks = {str(i): Histories(tuple(part), NUM_ITEMS) for i, part in enumerate(cut)}
        return fit(KEY, release.Blocks(blocks), **BUDGET)

    return program


UNBOUNDED = {
    "popularity": of_histories(lambda h: popularity.fit(KEY, h, **BUDGET)),
    "token probabilities": of_histories(
        lambda h: reattention.token_probabilities(KEY, h, max_tokens=3, **BUDGET)
    ),
    "transitions": of_histories(lambda h: transitions.fit(KEY, h, num_kept=6, rounds=3, **BUDGET)),
    "transitions, K by rule": of_histories(lambda h: transitions.fit(KEY, h, **BUDGET)),
    "transitions, either order": of_histories(
        lambda h: transitions.fit(KEY, h, num_kept=6, rounds=2, order_weight=0.0, **BUDGET)
    ),
    "item Gram": of_histories(lambda h: item_gram.fit(KEY, h, num_kept=5, **BUDGET)),
    "popularity, over blocks": over_blocks(popularity.fit),
    "transitions, over blocks": over_blocks(
        functools.partial(transitions.fit, num_kept=6, rounds=2)
    ),
    "item Gram, over blocks": over_blocks(functools.partial(item_gram.fit, num_kept=5)),
    "1-grams": counted(1),
    "3-grams": counted(3),
    "sketch, add or remove": of_rows(),
    "sketch, add or remove, simplex": of_rows(value_domain="simplex", domain="ball"),
    "sketch, add or remove, random features": of_rows(features="random", num_features=20),
    "Gram, add or remove": lambda users: gram.release(
        KEY,
        columns(users),
        column_bound=2.0,
        neighboring="add_or_remove_one",
        **BUDGET,
    ),
    "sampled Gram, add or remove": lambda users: gram.release(
        KEY,
        columns(users),
        column_bound=2.0,
        mechanism="sampling",
        eta=4000.0,
        neighboring="add_or_remove_one",
        **BUDGET,
    ),
}


def removals(users):
    """Lists that lack one record: the first, one in the middle, the longest, a duplicate, the last."""
    for index in (0, 4, 5, len(users) - 2, len(users) - 1):
        ids = np.delete(np.arange(len(users)), index)
        yield [users[i] for i in ids], ids
    # One more, and an extreme one: all items, many times.
    extreme = np.tile(np.arange(NUM_ITEMS, dtype=np.int32), 6)
    yield [*users, extreme], np.arange(len(users) + 1)


# Near others that are fast.
SELDOM = (
    "transitions, K by rule",
    "sketch, add or remove, simplex",
    "sketch, add or remove, random features",
    "sampled Gram, add or remove",
)


def rare(names, slow):
    """Parameters, of which these are slow."""
    return [pytest.param(x, marks=pytest.mark.slow if x in slow else ()) for x in names]


@pytest.mark.parametrize("name", rare(UNBOUNDED, SELDOM))
def test_adding_or_removing_a_record_moves_each_release_by_what_it_declares(name):
    program, users = UNBOUNDED[name], histories()
    first = audit.record(program, users)
    ratios = [
        audit.replay(program, users, other, ids=ids, first=first).check().largest_ratio
        for other, ids in removals(users)
    ]
    assert max(ratios) > 0.3  # the bound is not idle
    alone, empty = [users[5]], [users[5][:0]]
    ratios.append(audit.replay(program, alone, empty).check().largest_ratio)
    print(f"\n| {name} | {len(ratios)} | {max(ratios):.7f} |")  # python -m pytest -s


# ---------------------------------------------------------------------------------------------------------
# Replacing a record


def memory():
    rng = np.random.default_rng(1)
    return rng.random((23, 2)).astype(np.float32), rng.uniform(-1, 1, (23, 3)).astype(np.float32)


def attention(**options):
    options = {"key_bound": 1.0, "value_bound": 1.0, "clip": True, **BUDGET, **options}
    return lambda data: cross_attention.build(KEY, *data, **options)


class Remembered(NamedTuple):
    state: Any
    guarantee: PrivacyGuarantee


def remember(data):
    layer = PrivateCrossAttention(
        4, 5, num_heads=2, head_dim=3, key_bound=1.0, value_bound=0.5, num_features=16,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    layer.remember(KEY, np.concatenate(data, axis=1), **BUDGET)
    return Remembered(nnx.state(layer), layer.guarantee)


def traced_gram(data):
    """Under a transformation of X, where floats are summed."""
    stated = []

    def program(X):
        made = gram.release(KEY, X, column_bound=1.0, **BUDGET)
        stated.append(made.guarantee)
        return made.matrix

    return Remembered(jax.jit(program)(data[1].T), stated[0])


def head_features(data):
    K, V = data
    return noisy_head.Features(V.astype(np.float64), V[:, ::-1].astype(np.float64), K[:, 0])


HYPER = noisy_head.HyperParameters(0.5, 0.8, 1.0)
DESCENT = {"regularization": 0.1, "step_size": 0.5, "steps": 3}
TREES = {
    "x": lambda data: data[0].astype(np.float64),
    "weights": lambda data: np.clip(data[1][:, 0], -1, 1),
}


def distance_tree(kind, **options):
    options = {"bound": 1.0, "weight_bound": 1.0, "bins": 8, **BUDGET, **options}

    def program(data):
        x = np.clip(TREES["x"](data), 0, 1)
        x = x[:, 0] if kind is cross_attention.DPTreeDistance else x
        return kind.build(KEY, x, TREES["weights"](data), **options)

    return program


REPLACED = {
    "sketch": attention(),
    "sketch, traced": lambda data: jax.jit(lambda K, V: attention()((K, V)))(*data),
    "sketch, ball": attention(domain="ball", scale=1.0, degree=2),
    "sketch, simplex": attention(value_domain="simplex"),
    "sketch, random features": attention(features="random", num_features=20),
    "trees": attention(mechanism="tree", degree=2, bins=8),
    "trees, two copies": attention(mechanism="tree", degree=1, bins=4, copies=2),
    "trees, truncated Laplace": attention(
        mechanism="tree", degree=2, bins=8, noise="truncated_laplace"
    ),
    "trees, paper's budget": attention(
        mechanism="tree", degree=1, bins=8, noise="truncated_laplace", budget="paper"
    ),
    "DPTreeHighDim": distance_tree(cross_attention.DPTreeHighDim),
    "DPTreeHighDim, truncated Laplace": distance_tree(
        cross_attention.DPTreeHighDim, noise="truncated_laplace"
    ),
    "DPTreeDistance": distance_tree(cross_attention.DPTreeDistance, power=1),
    "mean of V": lambda data: baselines.mean_of_values(KEY, data[1], value_bound=1.0, **BUDGET),
    "fresh noise": lambda data: baselines.fresh_noise(
        KEY, np.full((2, 2), 0.5), *data, key_bound=1.0, value_bound=1.0, clip=True, **BUDGET
    ),
    "cross-attention layer": remember,
    "NoisyHead": lambda data: noisy_head.fit(KEY, head_features(data), HYPER, **DESCENT, **BUDGET),
    "NoisyHead, one shot": lambda data: noisy_head.fit_one_shot(
        KEY, head_features(data), HYPER, regularization=0.1, **BUDGET
    ),
    "Gram, replace": lambda data: gram.release(KEY, data[1].T, column_bound=1.0, **BUDGET),
    "Gram, traced": traced_gram,
    "Gram, moved": lambda data: gram.release(
        KEY, data[1].T, column_bound=1.0, max_column_change=2.0, psd=True, **BUDGET
    ),
    "sampled Gram, replace": lambda data: gram.release(
        KEY, data[1].T, column_bound=1.0, mechanism="sampling", eta=2000.0, **BUDGET
    ),
}


def replacements(data):
    K, V = data
    rows = [(0, np.zeros(2), -np.sign(V[0])), (11, np.ones(2), np.ones(3))]
    rows += [(22, K[22], -V[22]), (7, np.full(2, 1e30), np.full(3, -1e30))]
    rows += [(5, K[4], V[4]), (3, np.array([1.0, 0.0]), np.array([1.0, 0.0, 0.0]))]
    for index, k, v in rows:
        other = K.copy(), V.copy()
        other[0][index], other[1][index] = k, v
        yield other


# Each is another one with other noise, domains or numbers of copies, or under jit.
VARIANTS = (
    "sketch, ball",
    "sketch, random features",
    "sketch, traced",
    "trees, paper's budget",
    "trees, truncated Laplace",
    "trees, two copies",
    "NoisyHead, one shot",
    "Gram, traced",
)


@pytest.mark.parametrize(
    "name",
    rare(REPLACED, VARIANTS),
)
def test_replacing_a_record_moves_each_release_by_what_it_declares(name):
    program, data = REPLACED[name], memory()
    data[1][0] = 1.0  # a corner, whose opposite is tried
    first = audit.record(program, data)
    ratios = [
        audit.replay(program, data, other, first=first).check().largest_ratio
        for other in replacements(data)
    ]
    assert max(ratios) > 0.01
    alone = tuple(part[:1] for part in data)
    opposite = alone[0], -alone[1]
    ratios.append(audit.replay(program, alone, opposite).check().largest_ratio)
    print(f"\n| {name} | {len(ratios)} | {max(ratios):.7f} |")


def test_the_page_of_security_has_a_row_for_each_mechanism():
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    assert re.findall(r"^\| (.+) \| 7 \| [01]\.[0-9]{7} \|$", page, re.M) == [*UNBOUNDED, *REPLACED]


# ---------------------------------------------------------------------------------------------------------
# Noise and its price


@pytest.mark.parametrize("name", rare({**UNBOUNDED, **REPLACED}, (*SELDOM, *VARIANTS)))
def test_the_noise_that_is_drawn_costs_what_is_stated(name, monkeypatch):
    """Of every mechanism, and no noise is drawn from a key that does not follow from the caller's."""
    program = {**UNBOUNDED, **REPLACED}[name]
    data = histories() if name in UNBOUNDED else memory()
    stated, runs = [], []

    def watched(data):
        result = program(data)
        stated.append(result.guarantee)
        return result

    for seed in (3, 4):
        monkeypatch.setattr(sys.modules[__name__], "KEY", jax.random.key(seed))
        runs.append(audit.record(watched, data))
    assert not {seen.key for seen in runs[0].releases} & {seen.key for seen in runs[1].releases}
    found, spent = runs[0], stated[0]
    assert (spent.epsilon, spent.delta) == (pytest.approx(1.0, rel=1e-6), pytest.approx(1e-5))
    if "sampled" in name:  # whose noise is that of a number of samples
        (seen,) = found.releases
        paid = gram.sampling_epsilon(
            int(seen.scale),
            spent.delta,
            column_bound=1.0,
            eta=1 / seen.about["change"],
            n=len(seen.exact[0]),
            neighboring="add_or_remove_one",
        )
        assert 0.9 < paid <= spent.epsilon * (1 + 1e-9)
        return
    if "truncated Laplace" in name or "paper" in name:
        assert price_of_laplace_trees(found, spent.delta) <= spent.epsilon * (1 + 1e-6)
        return
    by_event, _ = event_epsilon(spent.event, spent.delta, spent.neighboring)
    assert by_event == pytest.approx(spent.epsilon, rel=1e-6)
    assert found.epsilon(spent.delta, spent.neighboring) == pytest.approx(spent.epsilon, rel=1e-6)
    for seen in found.releases:
        # In 32 bits a sum over many records moves by more than one of them does. What is traced is as wide
        # as its input.
        wide = np.float32 if "traced" in name else np.float64
        assert {leaf.dtype for leaf in seen.exact} == {np.dtype(wide)}
        stds = seen.scale[0] if seen.about["parts"] > 1 else seen.scale * seen.unit[0]
        multipliers = stds / seen.unit[0]
        np.testing.assert_allclose(multipliers, np.ravel(multipliers)[0], rtol=1e-6)


def price_of_laplace_trees(found, delta):
    """ε of all levels of all trees, by the better of basic and advanced composition.

    A tree's sensitivity is that of its levels together; a record moves each by the same share.
    """
    parts = []
    for seen in found.releases:
        scale, bound = (np.broadcast_to(part, seen.exact[0].shape)[0] for part in seen.scale)
        depth = int(np.log2(len(seen.exact[0]) + 2)) - 1
        each = np.broadcast_to(seen.unit[0], seen.exact[0].shape)[0] / depth
        laws = zip(*map(np.ravel, (scale, bound, each)), strict=True)
        for law_scale, law_bound, moved in laws:
            law = noise.TruncatedLaplace(float(law_scale), float(law_bound))
            one = law.guarantee(float(moved) * (1 - 1e-6), neighboring=REPLACE_ONE, unit="record")
            parts += [(one.epsilon, one.delta)] * depth
    epsilons, deltas = np.array(parts).T
    slack = delta - deltas.sum()
    assert slack >= -1e-6 * delta
    advanced = np.inf
    if slack > 1e-3 * delta:
        square = np.sqrt(2 * np.log(1 / slack) * np.sum(epsilons**2))
        advanced = np.sum(epsilons * np.expm1(epsilons)) + square
    return min(epsilons.sum(), advanced)
