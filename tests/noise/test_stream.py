"""Words of a stream: the cipher's published keystream, places that share none, and the law of draws."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpx import noise
from dpx.noise import lattice, laws, leaves
from dpx.noise.stream import Stream

SECRET = bytes(range(32))
SHAPES = ((5, 7), (), (0, 3), (5, 7), (130, 200), (40,), (2, 3, 4))


def test_it_is_the_keystream_of_rfc_8439():
    """Appendix A.1, test vectors 1 and 2 (two blocks of one stream), 3, and 5."""
    first, second = np.split(Stream(bytes(32)).words(32, 0), 2)
    assert first.tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert second.tobytes().hex() == (
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    third = Stream(bytes(31) + b"\1").words(32, 0)[16:]
    assert third.tobytes().hex() == (
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"
    )
    nonce = Stream(bytes(32)).words(16, 0, 0, 2 << 24)  # the last byte of twelve is 2
    assert nonce.tobytes().hex() == (
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"
    )


def test_long_draws_are_one_keystream():
    """Whatever the pieces are that it is made in."""
    whole = Stream(SECRET).words(2**19 + 5, 3, 1)
    np.testing.assert_array_equal(Stream(SECRET).words(2**17 + 1, 3, 1), whole[: 2**17 + 1])
    assert len(np.unique(whole)) > 2**19 - 100
    assert Stream(SECRET).words(0, 3).shape == (0,)


def test_places_have_words_of_their_own():
    places = [(0,), (1,), (0, 1), (1, 1), (0, 0, 1), (2**32 - 1,), (0, 2**32 - 1)]
    found = [set(Stream(SECRET).words(1000, *place).tolist()) for place in places]
    found += [set(Stream(SECRET[::-1]).words(1000, 0).tolist())]
    assert all(len(a & b) < 3 for a, b in itertools.combinations(found, 2))
    with pytest.raises(Exception, match="format"):  # no place has a number of more bits
        Stream(SECRET).words(1, 2**32)


def words_of(bits):
    return [np.asarray(x).ravel() for x in jax.tree.leaves(bits)]


def test_no_two_arrays_or_steps_share_a_word():
    """Of one step or of two; shapes that come twice are one group, whose arrays have words of their own."""
    drawn = [words_of(Stream(SECRET).bits(step, SHAPES)) for step in (0, 1, 2**31)]
    every = np.concatenate([x for each in drawn for x in each])
    # Words of 32 bits meet by chance, n²/2³³ times.
    assert len(every) - len(np.unique(every)) < 5 + len(every) ** 2 / 2**32
    (one, *_), (other, *_) = drawn[:2]
    assert not np.array_equal(one, other)


def released(key, exact):
    return noise.release(key, exact, sensitivity=1.0, noise_multiplier=2.0, label="sums")


@pytest.mark.slow
def test_each_entry_is_drawn_from_its_own_words():
    """Bit for bit what the construction, `dpx.noise.lattice`, makes of the words of each entry."""
    bits = Stream(SECRET).bits(4, SHAPES)
    draws = leaves.draws_like(bits, [jnp.zeros(shape) for shape in SHAPES])
    groups = [[0, 3], [1], [2], [4], [5], [6]]
    for words, members in zip(bits.words, groups, strict=True):
        size, rounding = (np.asarray(x).reshape(-1) for x in (words.size, words.rounding))
        columns = np.arange(size.size) // lattice.SHARING
        assert len(words.low_size) == max(1, -(-size.size // lattice.SHARING))
        shared = (np.asarray(x)[columns] for x in (words.low_size, words.low_rounding))
        plain = lattice.Words(size, rounding, *shared)
        normal = np.concatenate([np.ravel(draws[k].normal) for k in members])
        uniform = np.concatenate([np.ravel(draws[k].uniform) for k in members])
        np.testing.assert_array_equal(normal, lattice.whole_normal(plain))
        np.testing.assert_array_equal(uniform, lattice.uniforms(plain))
    assert [draw.normal.shape for draw in draws] == list(SHAPES)


@pytest.mark.quick_cases("float64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_has_the_law_that_is_stated(dtype):
    with jax.enable_x64(dtype == np.float64):
        exact = jnp.full((300, 400), 1.7, dtype)
        found = np.asarray(released(Stream(SECRET).bits(0, (exact.shape,)), exact), np.float64)
    grid = np.random.default_rng(0).uniform(-1, 1, found.shape) / 256
    assert stats.kstest(((found - 1.7) / 2 + grid).ravel(), "norm").pvalue > 1e-3
    rows = np.corrcoef(found.reshape(-1, 1200))[np.triu_indices(100, 1)]
    assert abs(rows.mean()) < 5 * 1200**-0.5 / len(rows) ** 0.5
    assert rows.std() == pytest.approx(1200**-0.5, rel=0.05)


@pytest.mark.slow
def test_far_out_further_words_decide():
    """A draw whose words are zero goes on with those of the group, past those that are zero too."""
    shape = (5000, 4)  # not small, and so a group by itself
    bits = Stream(SECRET).bits(0, (shape,))
    (words,), (further,) = bits
    further = further.at[:2].set(0).at[2].set(7)
    bits = leaves.Bits(
        (
            words._replace(
                size=words.size.at[0, 3, 1].set(0), low_size=jnp.zeros_like(words.low_size)
            ),
        ),
        (further,),
    )
    (draw,) = leaves.draws_like(bits, [jnp.zeros(shape)])
    zero = lattice.Words(*(jnp.zeros(1, jnp.uint32) for _ in range(4)))
    wanted = lattice.far_size(zero, jnp.uint32([7]), jnp.int32([2]))
    assert int(draw.normal[3, 1]) == int(wanted[0]) > 13 * lattice.RESOLUTION
    others = np.delete(np.asarray(draw.normal).ravel(), 13)
    assert np.abs(others).max() < 6 * lattice.RESOLUTION


def test_noise_whose_tail_would_end_too_soon_is_refused():
    """At 18 standard deviations to the neighbour, what no draw of its reaches is less than 1e-20 of δ."""
    zero = lattice.Words(*(jnp.zeros(1, jnp.uint32) for _ in range(4)))
    last = lattice.far_size(zero, jnp.uint32([1]), jnp.int32([leaves.FURTHER - 1]))
    assert stats.norm.sf(float(last[0]) / lattice.RESOLUTION - 18) < 1e-20

    def released(noise_multiplier):
        about = {"sensitivity": 1.0, "noise_multiplier": noise_multiplier, "label": "sums"}
        return noise.release(Stream(SECRET).bits(0, ((5,),)), jnp.zeros(5), **about)

    for enough in (1 / 18, np.float32(1.0), 0):
        assert released(enough).shape == (5,)
    for small in (0.0555, jnp.float32(0.01)):
        with pytest.raises(ValueError, match=r"noise_multiplier=0.0.* at least 1/18 with secure"):
            released(small)
    with pytest.raises(ValueError, match="at least 1/18"):
        jax.jit(released)(1.0)


def test_samples_draw_uniform_numbers():
    place = Stream(SECRET).at(3, 1)
    found = place.random(100_000)
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    assert 0 <= found.min() < found.max() < 1
    assert (found * 2**53 == np.round(found * 2**53)).all()
    whole = Stream(SECRET).at(3, 2).integers(7, size=100_000)
    assert stats.chisquare(np.bincount(whole, minlength=7)).pvalue > 1e-3


def test_bad_input_is_named(monkeypatch):
    exact = jnp.zeros(5)
    with pytest.raises(ValueError, match="secret has 31 bytes, which must be 32"):
        Stream(bytes(31))
    # One draw for all five.
    with pytest.raises(ValueError, match=r"bits are for groups .*\(1, 1\).* must be .*\(1, 5\)"):
        released(Stream(SECRET).bits(0, ((1,),)), exact)
    law = laws.Laplace(1.0)
    with pytest.raises(ValueError, match=r"sums: law=Laplace.* must have a key"):
        noise.release(
            Stream(SECRET).bits(0, ((5,),)), exact, sensitivity=1.0, law=law, label="sums"
        )
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'cryptography: .* pip install -e "\.\[secure\]"'
    ):
        Stream(SECRET)
