"""Users with several records in `dpx.training.fit`: against padded rows, and what a step draws of each."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import training_cases
from training_cases import close, loss_fn, same, seen_steps

import dpx
from dpx import _processes, privacy
from dpx.training import loop
from dpx.training import users as people

RNG = np.random.default_rng(0)
COUNTS = [1, 3, 40, 2, 7, 1, 5, 12, 1, 4, 2, 30]
USERS = RNG.permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))
X = RNG.normal(size=(len(USERS), 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 3.0]) + USERS).astype(np.float32)


def fit(data=(X, Y), loss=loss_fn, users=USERS, records_per_user=4, **changes):
    settings = {"delta": 1e-2, "batch_size": 4, "steps": 5, "l2_clip_norm": 2.0}
    about = {"users": users, "records_per_user": records_per_user}
    return training_cases.fit(data, loss, **settings | about | changes)


def padded(most):
    """One row of all that a user has, as the loss of one example took them before there were users."""
    x, y = np.zeros((len(COUNTS), most, 3), np.float32), np.zeros((len(COUNTS), most), np.float32)
    for user, count in enumerate(COUNTS):
        own = np.flatnonzero(user == USERS)
        x[user, :count], y[user, :count] = X[own], Y[own]
    return x, y, np.arange(most) < np.array(COUNTS)[:, None]


@pytest.mark.quick_cases("poisson")
@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_a_user_is_one_example_whose_loss_is_the_mean_of_all_records(sampling):
    """With room for all records nothing is drawn: padded rows must give the same, and the same price."""
    most = max(COUNTS)

    def mean(params, x, y, there):
        losses = (x @ params["w"] + params["b"] - y) ** 2
        return jnp.sum(losses * there) / there.sum()

    found = fit(records_per_user=most, sampling=sampling, microbatch_size=3)
    wanted = fit(padded(most), mean, None, None, sampling=sampling, unit="user")
    close(found.params, wanted.params)
    assert np.abs(found.params["w"]).max() > 0.01
    np.testing.assert_allclose(
        [r.loss for r in found.history], [r.loss for r in wanted.history], rtol=1e-5
    )
    assert found.guarantee.event == wanted.guarantee.event
    assert found.guarantee.epsilon == wanted.guarantee.epsilon


@pytest.mark.slow
def test_the_guarantee_is_about_users_and_their_number():
    found = fit().guarantee
    assert found.unit == "user"
    assert {people.ASSUMPTION, "which users are sampled stays as secret as the noise"} <= {
        *found.assumptions
    }
    assert found.assumptions[0].startswith("the number of users is public")
    about = {"sampling_probability": 4 / 12, "steps": 5}
    multiplier = dpx.calibrate_dpsgd(2.0, 1e-2, **about)
    assert found.event == privacy.dpsgd_event(multiplier, **about)
    assert found.epsilon == pytest.approx(dpx.dpsgd_epsilon(multiplier, 1e-2, **about))
    assert fit(unit="patient").guarantee.unit == "patient"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_records_are_distinct_and_each_choice_is_as_likely(count):
    """All C(6, 3) = 20 choices in 20,000 draws; where there are no more than G, all of them."""
    keys = jax.random.split(jax.random.key(5), 20_000)
    drawn = np.array(jax.vmap(lambda key: people._distinct(key, count, 3))(keys))
    if count <= 3:
        assert (drawn == np.minimum(np.arange(3), count - 1)).all()
        return
    seen = collections.Counter(map(tuple, np.sort(drawn, axis=1).tolist()))
    assert set(seen) == set(itertools.combinations(range(count), 3))
    expected = 20_000 / len(seen)
    chi2 = sum((n - expected) ** 2 / expected for n in seen.values())
    assert chi2 < len(seen) - 1 + 4 * np.sqrt(2 * (len(seen) - 1))


@pytest.mark.slow
def test_what_a_step_holds_does_not_grow_with_the_largest_user():
    """A user of 100,000 records among 20: G of them at a time, all of them in the end."""
    whose = np.concatenate([np.arange(20), np.full(100_000, 7)])
    users = people.grouped(whose, 4, len(whose))
    assert (len(users), users.most) == (20, 4)
    assert users.order.shape == (100_020,)
    assert users.begins.shape == (21,)
    rows = np.arange(100_020, dtype=np.int32)
    held = ((users.sort(rows),), *map(jnp.asarray, users.spans))
    seen = set()
    for step in range(8):
        keys = dpx.clipping.record_keys(jax.random.key(2), step, np.arange(20))
        (there, drawn), own = people.draw(held, np.arange(20), keys, 4)
        assert (there.shape, drawn.shape, own.shape) == ((20, 4), (20, 4), (20, 4))
        for user, (mask, found) in enumerate(zip(np.array(there), np.array(drawn), strict=True)):
            assert mask.sum() == (4 if user == 7 else 1)
            assert set(whose[found].tolist()) == {user}
            assert len(set(found[mask].tolist())) == mask.sum()
        seen |= set(np.array(drawn)[7].tolist())
    assert len(seen) > 28  # afresh in each step


@pytest.mark.quick_cases("threefry2x32")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_what_a_user_draws_follows_from_nobody_else(impl):
    """Neither from the place in the batch or in the data, nor from who else is in either."""
    whose = np.repeat(np.arange(6), [9, 1, 9, 3, 9, 9])
    rows = np.arange(len(whose), dtype=np.int32)

    def drawn(whose, rows, names, batch):
        users = people.numbered(whose, len(names), 4)
        held = ((users.sort(rows),), *map(jnp.asarray, users.spans))
        key = jax.random.key(1, impl=impl)
        keys = dpx.clipping.record_keys(key, 3, np.array(names)[batch])
        (there, found), own = people.draw(held, np.array(batch), keys, 4)
        parts = zip(np.array(there), np.array(found), jax.random.key_data(own), strict=True)
        found = [[x.tolist() for x in each] for each in parts]
        return {names[u]: each for u, each in zip(batch, found, strict=True)}

    all_users = drawn(whose, rows, range(6), [0, 1, 2, 3, 4, 5])
    others = [0, 2, 3, 5]
    own_place = rows - np.searchsorted(whose, whose)
    mixed = np.lexsort((whose, own_place))  # the first record of each, the second of each, ...
    mixed = mixed[np.isin(whose[mixed], others)]
    fewer = drawn(np.searchsorted(others, whose[mixed]), rows[mixed], others, [2, 0, 3, 1])
    assert fewer == {user: all_users[user] for user in others}
    assert len({tuple(all_users[user][1]) for user in (0, 2, 4, 5)}) == 4
    assert all_users[0][1] != (np.array(all_users[2][1]) - 10).tolist()


@pytest.mark.slow
def test_the_program_of_a_step_is_the_same_for_other_users():
    """How many records others have decides no shape in it, and so not how it rounds."""
    programs = []

    def see(jitted, *arguments):
        programs.append(jitted.lower(*arguments).as_text())
        return jitted(*arguments)

    kept = USERS != 2  # who has 40 records, and has a single one here
    kept[np.flatnonzero(~kept)[0]] = True
    with seen_steps(see):
        fit(steps=1)
        fit((X[kept], Y[kept]), users=USERS[kept], steps=1)
    assert len(programs) == 2
    assert programs[0] == programs[1]


@pytest.mark.slow
def test_any_identifiers_and_any_order_of_users_rows():
    """Names, 64-bit numbers and columns of pandas; the rows of others may lie anywhere between."""
    wanted = fit()
    big = 2**62 + USERS.astype(np.int64)  # a float holds one of them
    names = np.array([f"user {number:02}" for number in USERS], object)
    together = np.argsort(USERS, kind="stable")
    for found in (
        fit(users=big),
        fit(users=names.tolist()),
        fit(users=pd.Series(names)),
        fit(users=pd.array(USERS, dtype="Int64")),
        fit(users=jnp.asarray(USERS)),
        fit((X[together], Y[together]), users=USERS[together]),
    ):
        same(found.params, wanted.params)


@pytest.mark.slow
def test_one_user_and_a_user_for_each_record():
    one = fit(users=["ann"] * len(X), batch_size=1)
    assert one.guarantee.unit == "user"
    assert np.isfinite(one.params["w"]).all()
    with pytest.warns(UserWarning, match="exceeds 1/12, one over the number of users"):
        fit(delta=0.1)
    alone = fit(users=np.arange(len(X)), records_per_user=1, delta=1e-3)
    rows = fit(users=None, records_per_user=None, delta=1e-3)
    close(alone.params, rows.params)
    assert alone.guarantee.epsilon == rows.guarantee.epsilon


def test_no_report_follows_from_the_number_of_records(monkeypatch):
    """It is not public; the number of users is."""
    monkeypatch.setattr(loop, "train", lambda *args, **rest: (training_cases.PARAMS, []))

    def of(rows):
        held = jnp.arange(1.0, rows + 1)
        return lambda params, x, y: loss_fn(params, x, y) * held.mean()

    fit(loss=of(len(USERS)), strict=True)
    with pytest.raises(ValueError, match=rf"shape \({len(COUNTS)},\), with as many rows"):
        fit(loss=of(len(COUNTS)), strict=True)


def test_a_user_of_two_processes_is_refused(monkeypatch):
    monkeypatch.setattr(_processes, "several", lambda: True)
    monkeypatch.setattr(_processes, "of_each", lambda own: [own, theirs + own[:1]])
    theirs = []
    with pytest.raises(ValueError, match="users has 1 identifiers in several processes"):
        people.grouped(["ann", "bob"], 2, 2)
    monkeypatch.setattr(_processes, "of_each", lambda own: [own, ["other"]])
    assert len(people.grouped(["ann", "bob"], 2, 2)) == 2
