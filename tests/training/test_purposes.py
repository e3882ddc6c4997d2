"""A key follows from a secret and the name of what it is for, and a name serves once."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_cases
from training_cases import same

import dpx
from dpx import audit
from dpx.training import keys as secrets
from dpx.training.keys import Keys

X = np.random.default_rng(0).normal(size=(64, 200)).astype(np.float32)
SECRET = jax.random.wrap_key_data(jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32))


def opened(key=SECRET, seed=4):
    return Keys(key, np.random.SeedSequence(seed))


def words(key):
    return tuple(jax.random.key_data(key).tolist())


def fit(key, data=X, **changes):
    def loss(w, x):
        return jnp.sum(w * x)

    given = {"batch_size": 32, "steps": 2, "l2_clip_norm": 1.0, "optimizer": optax.sgd(1.0)}
    return training_cases.fit(data, loss, jnp.zeros(200), **given | {"key": key} | changes)


def test_a_key_is_the_keyed_hash_of_its_name():
    secret = bytes.fromhex("78563412f0debc9a")  # the words above, the lowest byte first
    hashed = hashlib.blake2b(b"release: popularity", key=secret, digest_size=8).digest()
    expected = [int.from_bytes(hashed[i : i + 4], "little") for i in (0, 4)]
    assert list(words(opened().noise("popularity"))) == expected


def test_a_key_follows_from_its_name_and_from_nothing_else():
    one, other = opened(), opened()
    first = {name: words(one.noise(name)) for name in ("a", "b", "prior")}
    turned = {name: words(other.noise(name)) for name in ("prior", "new", "b", "a")}
    assert first == {name: turned[name] for name in first}
    assert len(set(turned.values())) == 4
    # Both words move with the name.
    assert len({key[0] for key in turned.values()}) == len({key[1] for key in turned.values()}) == 4


def all_randomness(keys, name):
    noise, dropout, sampling = keys.training(name)
    seeds = sampling, keys.seed(name)
    return [
        words(noise),
        words(dropout),
        words(keys.noise(name)),
        *(s.entropy for s in seeds),
    ]


def test_what_is_for_different_purposes_shares_nothing():
    drawn = all_randomness(opened(), "run")
    assert len(set(drawn)) == 5
    assert drawn == all_randomness(opened(), "run")
    assert not set(drawn) & set(all_randomness(opened(), "run2"))
    samples, noise = set(drawn[3:]), set(drawn[:3])
    assert set(all_randomness(opened(seed=5), "run")) & set(drawn) == noise
    assert set(all_randomness(opened(jax.random.key(5)), "run")) & set(drawn) == samples


def test_keys_that_follow_from_one_secret_share_nothing():
    for keys in (secrets.derive(SECRET), secrets.derive(jax.random.key_data(SECRET))):
        drawn = all_randomness(keys, "run")
        assert len({*drawn, words(SECRET)}) == 6
    assert drawn != all_randomness(secrets.derive(jax.random.key(0)), "run")


def test_seeds_have_all_bits_of_their_secret():
    for seed in (opened().seed("a"), opened().training("a").sampling):
        assert 230 < seed.entropy.bit_length() <= 256


@pytest.mark.parametrize("draw", ["noise", "seed", "training"])
def test_a_name_serves_once(draw):
    keys = opened()
    getattr(keys, draw)("popularity")
    getattr(keys, draw)("popularity_seed1")
    with pytest.raises(ValueError, match="='popularity' must be another one, since its key has"):
        getattr(keys, draw)("popularity")
    for nameless in ("", None, 3):
        with pytest.raises(ValueError, match="must be a name"):
            getattr(opened(), draw)(nameless)


def test_a_training_is_given_its_keys_again_where_it_begins_with_the_same():
    keys = opened()
    first = keys.training("a", begun=["digest", {"epsilon": 1.0}])
    again = keys.training("a", begun=["digest", {"epsilon": 1.0}])
    assert words(first.noise) == words(again.noise)
    for begun in (["other", {"epsilon": 1.0}], ["digest", {"epsilon": 2.0}], None):
        with pytest.raises(ValueError, match="label='a' must be another one"):
            keys.training("a", begun=begun)


def test_keys_are_not_shown():
    keys = opened()
    keys.noise("a")
    assert not any(str(word) in repr(keys) for word in (0x12345678, "0x12345678", "xV4"))


@pytest.mark.slow
def test_a_training_under_keys_is_not_repeated_with_other_data_or_arguments(tmp_path):
    keys = opened()
    first = fit(keys, workdir=tmp_path / "one", label="a")
    # In its folder, and in another one, it is the same training.
    for folder in ("one", "two"):
        same(fit(keys, workdir=tmp_path / folder, label="a").params, first.params)
    for changes in ({"data": X + 1}, {"epsilon": 1.0}, {"steps": 1}):
        with pytest.raises(ValueError, match="label='a' must be another one"):
            fit(keys, workdir=tmp_path / f"with other {[*changes]}", label="a", **changes)
    fit(keys, label="b")
    for label in "ab":
        with pytest.raises(ValueError, match=f"label='{label}' must be another one"):
            fit(keys, label=label)


def both_trained(make_key, labels):
    def program(data):
        key = make_key()
        return [fit(key, data, label=label, epsilon=i + 1.0).params for i, label in labels]

    return audit.record(program, X, ignore=["*"])


@pytest.mark.slow
def test_trainings_of_two_labels_share_neither_noise_nor_samples_nor_masks():
    with audit.recording():
        for make_key in (opened, lambda: SECRET):
            found = both_trained(make_key, enumerate("ab"))
            assert len(found.releases) == 4
            assert not found.shared_keys()
            used = {
                purpose: {w for p, w in found.keys if p == purpose} for purpose, _ in found.keys
            }
            assert {p: len(keys) for p, keys in used.items()} == {"dropout": 4, "sampling": 2}
        # A JAX key does not remember what it was used for, but a replay sees it.
        assert len(both_trained(lambda: SECRET, enumerate("aa")).shared_keys()) == 5


@pytest.mark.slow
def test_noises_of_two_labels_do_not_cancel():
    """With the noise of one, two sums at two ε gave the exact sum away."""
    keys, about = opened(), {"batch_size": 64, "steps": 1, "delta": 1e-5}
    a, b = (fit(keys, label=label, epsilon=e, **about) for label, e in (("a", 1.0), ("b", 2.0)))
    sizes = [dpx.gaussian_noise_multiplier(e, 1e-5) for e in (1.0, 2.0)]
    clipped = X / np.maximum(1, np.linalg.norm(X, axis=1, keepdims=True))
    noises = [-64 * np.asarray(t.params) - clipped.sum(0) for t in (a, b)]
    for noise, size in zip(noises, sizes, strict=True):
        assert noise.std() == pytest.approx(size, rel=0.2)
    # Of 200 pairs: five standard deviations of none.
    assert abs(np.corrcoef(*noises)[0, 1]) < 5 / 200**0.5
