"""`dpx.training.fit(secure=True)`: what it draws from where, and what it says of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_cases
from training_cases import KEY, X, Y, loss_fn, of_users, same, secure

import dpx
from configs.quickstart import get_config
from dpx import audit
from dpx.noise import stream
from dpx.noise.stream import Stream
from dpx.training import AdaptiveClipNorm, loop
from dpx.training import users as people
from experiments.dp_transformer import training


def fit(**changes):
    return training_cases.fit(**{"steps": 4} | secure() | changes)


def own_keys():
    return secure()["key"].training("training", secure=True)


@pytest.mark.slow
def test_noise_and_samples_follow_from_the_secret_alone():
    """And from nothing that a JAX key or a seed of NumPy says."""
    first = fit()
    again = fit(**secure(seed=6))
    same(first.params, again.params)
    assert [r.loss for r in first.history] == [r.loss for r in again.history]
    for other in (fit(**secure(b"t" * 32)), fit(label="another")):
        assert (np.asarray(first.params["w"]) != other.params["w"]).all()
        # Of the first sample, before there is noise.
        assert other.history[0].loss != first.history[0].loss


@pytest.mark.slow
def test_without_keys_each_training_has_a_secret_of_its_own():
    one, other = fit(key=None), fit(key=None)
    assert (np.asarray(one.params["w"]) != other.params["w"]).all()
    assert one.history[0].loss != other.history[0].loss


@pytest.mark.slow
def test_no_place_of_a_stream_serves_twice(monkeypatch):
    """Noise has one stream, with a place for each step and array; samples and users' records another."""
    drawn = []
    words = Stream.words

    def recording(self, count, *place):
        drawn.append((self.secret, place))
        return words(self, count, *place)

    monkeypatch.setattr(Stream, "words", recording)
    fit(l2_clip_norm=AdaptiveClipNorm(count_noise=20.0), **of_users(2))
    own = own_keys()
    noise = [place for secret, place in drawn if secret == own.noise.secret]
    sampling = [place for secret, place in drawn if secret == own.sampling.secret]
    assert len(noise) + len(sampling) == len(drawn)
    # w; b and the count, which have one shape and are drawn as one.
    assert sorted(noise) == [(step, group) for step in range(4) for group in range(2)]
    expected = [(0, 1), *((step,) for step in range(4)), *((s, people._RECORDS) for s in range(4))]
    assert sorted(sampling) == sorted(expected)
    assert len(drawn) == len(set(drawn))  # no place serves twice


@pytest.mark.slow
@pytest.mark.parametrize("bands", [None, 2])
def test_the_noise_of_a_step_is_what_its_words_make(bands):
    about = {}
    if bands:
        pytest.importorskip("jax_privacy")
        about = {"noise": "banded", "bands": bands}
    recorded = audit.record(lambda rows: fit(data=rows, **about).params, (X, Y))
    own = own_keys()
    for step, release in enumerate(recorded.releases):
        bits = own.noise.bits(step, ((), (3,)))
        exact = [jnp.asarray(x) for x in release.exact]
        about = {"sensitivity": 0.5, "noise_multiplier": float(release.scale), "label": "sums"}
        again = jax.jit(lambda b, e: dpx.noise.release(b, e, **about))(bits, exact)  # noqa: B023
        same(again, list(release.noisy))
    assert len({release.key for release in recorded.releases}) == 4


@pytest.mark.slow
def test_which_records_a_user_gives_follows_from_the_stream():
    """Distinct, each as likely, anew in each step; and whoever else is in the batch does not matter."""
    counts, most = np.array([9, 2, 6, 6]), 3
    whose = np.repeat(np.arange(4), counts)
    rows = np.arange(len(whose), dtype=np.int32)
    users = people.numbered(whose, 4, most)
    layout = loop.Layout(None, 4)
    draw = people.drawing(users, (rows,), np.arange(4), layout, Stream(bytes(32)))

    def drawn(step, batch):
        places = np.array(batch, np.int32)
        dropout = (jax.random.key(0), step)
        (((there, found), _), _) = draw(dropout, places, np.ones(len(batch), bool), 1)
        return {
            u: tuple(np.array(f)[np.array(t)]) for u, t, f in zip(batch, there, found, strict=True)
        }

    every = [drawn(step, [0, 1, 2, 3]) for step in range(600)]
    for found in every:
        assert found[1] == (9, 10)
        for user in (0, 2, 3):
            assert len(set(found[user])) == most
            assert set(whose[list(found[user])]) == {user}
    for user, count in ((0, 9), (2, 6)):
        seen = np.bincount([i for found in every for i in found[user]], minlength=17)
        seen = seen[whose[: len(seen)] == user]
        assert (abs(seen - 1800 / count) < 5 * np.sqrt(1800 / count)).all()
    choices = {tuple(sorted(found[2])) for found in every}
    assert choices == set(itertools.combinations(range(11, 17), 3))
    assert [tuple(i - 11 for i in f[2]) for f in every] != [
        tuple(i - 17 for i in f[3]) for f in every
    ]
    assert drawn(7, [3, 0]) == {user: every[7][user] for user in (3, 0)}


@pytest.mark.slow
def test_the_guarantee_names_the_generator():
    assert stream.ASSUMPTION in fit().guarantee.assumptions
    plain = fit(secure=False, key=KEY)
    assert stream.ASSUMPTION not in plain.guarantee.assumptions


@pytest.mark.slow
def test_the_section_of_a_config_draws_from_streams(monkeypatch, tmp_path):
    """The private rows alone: a row without privacy has no noise."""
    section = get_config("tiny").train
    section.update({"secure": True, "batch_size": 16})
    privacy, guarantee = training.make_private(section, 2.0, 1e-3, 64, "record", ())
    assert stream.ASSUMPTION in guarantee.assumptions
    seen = []
    monkeypatch.setattr(loop, "train", lambda *_, keys, **rest: (seen.append(keys), None))
    own = {"keys": secure()["key"], "workdir": tmp_path}
    for label, private in (("private", privacy), ("plain", None)):
        training.train(loss_fn, {}, (X,), section, label=label, privacy=private, **own)
    assert [isinstance(x, Stream) for each in seen for x in each] == [True, False, True] + 3 * [
        False
    ]
    with pytest.raises(ValueError, match=r"noise_multiplier=.* must be .* at least 1/18"):
        training.make_private(section, 1e4, 1e-3, 64, "record", ())
    section.secure = False
    assert training.make_private(section, 1e4, 1e-3, 64, "record", ())
    _, guarantee = training.make_private(section, 2.0, 1e-3, 64, "record", ())
    assert stream.ASSUMPTION not in guarantee.assumptions


@pytest.mark.slow
def test_privatize_takes_words_or_a_key():
    about = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 1.0}
    total = jnp.zeros(3)
    private = dpx.privatize(key=None, **about)
    bits = Stream(bytes(32)).bits(0, ((3,),))
    noisy, state = private.update(total, private.init(total), bits=bits)
    assert (np.asarray(noisy) != 0).all()
    assert int(state.count) == 1
    with pytest.raises(ValueError, match="bits must be given to update with key=None"):
        private.update(total, private.init(total))
    keyed = dpx.privatize(key=KEY, **about)
    with pytest.raises(ValueError, match="and only then"):
        keyed.update(total, keyed.init(total), bits=bits)
