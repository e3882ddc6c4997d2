"""Noise: how fast it is, what its exact law costs, and what an adversary who knows that law gains.

python -m experiments.bench.noise [--size=4194304] [--runs=60] [--repeats=9]
python -m experiments.bench.noise --secure=1000000 [--repeats=9]    # a training's noise from a stream
"""

import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import dpx
from dpx import noise
from dpx.audit import epsilon_lower_bound
from dpx.noise import lattice
from dpx.noise.stream import Stream
from dpx.privacy import gaussian_epsilon
from dpx.training.layout import Layout
from dpx.training.streaming import bits_of_steps
from experiments.bench._noise_law import ideal, law
from experiments.bench._steps import medians, temp_bytes

SIZE = flags.DEFINE_integer("size", 2**22, "coordinates that are released at once")
RUNS = flags.DEFINE_integer("runs", 60, "releases of either neighbour for the attack")
REPEATS = flags.DEFINE_integer("repeats", 9, "timed calls, of which the median counts")

SECURE = flags.DEFINE_integer(
    "secure", None, "parameters whose noise is of a stream: nothing else is run"
)

R = lattice.RESOLUTION
DELTA, MULTIPLIER, WITHOUT = 1e-5, 7.6, 1.4848


def speed() -> None:
    """One release by `dpx.privatize`, over a plain sum with draws of `jax.random.normal`."""
    total = jnp.full(SIZE.value, WITHOUT, jnp.float32)

    @jax.jit
    def released(key):
        about: Any = {"l2_clip_norm": 1.0, "noise_multiplier": MULTIPLIER}
        optimizer = dpx.privatize(key=key, expected_batch_size=1.0, **about)
        return optimizer.update(total, optimizer.init(total))[0]

    @jax.jit
    def plain(key):
        return total + MULTIPLIER * jax.random.normal(key, total.shape)

    calls = {
        "dpx": lambda: released(jax.random.key(0)),
        "plain": lambda: plain(jax.random.key(0)),
    }
    times = medians(calls, REPEATS.value)
    print(
        f"{SIZE.value:,} coordinates on {jax.devices()[0].device_kind}: dpx.privatize "
        f"{1e3 * times['dpx']:.2f} ms, sum + σ·jax.random.normal {1e3 * times['plain']:.2f} ms: "
        f"{times['dpx'] / times['plain']:.2f} times"
    )


def streams(size: int) -> None:
    """The noise of a step from a key, and from words of a cryptographic stream, made ahead or not."""
    shapes, total = ((size,),), jnp.full(size, WITHOUT, jnp.float32)
    own = Stream(os.urandom(32))

    def noisy(key):
        about: Any = {"sensitivity": 1.0, "noise_multiplier": MULTIPLIER, "label": "sums"}
        return noise.release(key, total, **about)

    released = jax.jit(noisy)
    about = range(1, REPEATS.value + 2)
    words = own.bits(0, shapes)
    ahead = bits_of_steps(own, shapes, Layout(None, 1), about)

    steps = itertools.count()
    seconds = medians(
        {
            "by a key": lambda: released(jax.random.key(0)),
            "from words that are there": lambda: released(words),
            "making the words": lambda: own.bits(next(steps), shapes),
            "from words made ahead": lambda: released(next(ahead)),
        },
        REPEATS.value,
    )
    print(f"{size:,} parameters on {jax.devices()[0].device_kind}, of {os.cpu_count()} cores:")
    for name, found in seconds.items():
        print(f"  {name}: {1e3 * found:.1f} ms")
    for name, key in (("by a key", jax.random.key(0)), ("from words", words)):
        working = temp_bytes(released.lower(key).compile()) / size
        print(f"  {name}: {working:.1f} bytes a parameter of working memory")
    given = sum(x.nbytes for x in jax.tree.leaves(words))
    print(f"  the words: {given / size:.2f} bytes a parameter")


def cost() -> None:
    """What a coordinate and step adds to the KL divergence, beyond the Gaussian mechanism."""
    index = np.arange(-6 * R, 6 * R + 1, 3).astype(float)
    for std in (0.01, 1.9, 300.0):
        step = float(lattice.step_of(std, np.float32, multiplier_norm=std))
        worst = 0.0
        values = (std * 0.1953) / step % 1 + np.array([0.0, 0.13, 0.25, 0.5])
        errors = [law(index, value) / ideal(index, value) - 1 for value in values]
        weight = ideal(index, 0.0) * 3
        for one in errors:
            for other in errors:
                worst = max(worst, float(weight @ np.square(one - other)) / 2)
        print(f"noise of {std:g}: {worst:.1e} a coordinate and step")


def attack() -> None:
    """An adversary who knows the exact law of each coordinate, and both neighbours."""
    size = SIZE.value
    step = float(lattice.step_of(MULTIPLIER, np.float32, multiplier_norm=MULTIPLIER * size**0.5))
    values = [np.float32(WITHOUT), np.float32(WITHOUT + np.float32(size**-0.5))]
    low = int(np.floor(float(values[0]) / step)) - 5 * R
    index = np.arange(10 * R) + low
    table = jnp.asarray(
        np.log(law(index, float(values[1]) / step) / law(index, float(values[0]) / step))
    )
    optimizer = dpx.privatize(
        l2_clip_norm=1.0,
        noise_multiplier=MULTIPLIER,
        expected_batch_size=1.0,
        key=dpx.secret_key(),
    )

    @jax.jit
    def ratio(total, state):
        noisy, state = optimizer.update(jnp.full(size, total), state)
        place = jnp.clip(
            jnp.round(jnp.asarray(noisy) / step).astype(jnp.int32) - low, 0, 10 * R - 1
        )
        return table[place].reshape(2**11, -1).sum(1).sum(), state

    state, seen = optimizer.init(jnp.zeros(size)), ([], [])
    for _ in range(RUNS.value):
        for scores, value in zip(seen, values, strict=True):
            score, state = ratio(value, state)
            scores.append(float(score))
    one, other = map(np.array, seen)
    distance = (other.mean() - one.mean()) / np.sqrt((one.var() + other.var()) / 2)
    proven = epsilon_lower_bound(other, one, DELTA).epsilon
    print(
        f"{size:,} coordinates, {RUNS.value} + {RUNS.value} releases: d′ = {distance:.3f} where "
        f"1/multiplier = {1 / MULTIPLIER:.3f}; proven ε ≥ {proven:.3f}, stated "
        f"{gaussian_epsilon(MULTIPLIER, DELTA):.3f}"
    )


def floats() -> None:
    """What the low bits of one coordinate say where noise is a float that is added in 32 bits."""
    std, size = np.float32(1.9), 2**20
    values = [np.float32(0.3712), np.float32(0.3712) + np.float32(2**-11)]
    away = f"{2**-11 / std:.1e} standard deviations away"

    def say(name: str, shares: list[float]) -> None:
        print(
            f"{name}: {shares[0]:.4%} of what is released for {values[0]:g} can be made from it, and "
            f"{shares[1]:.4%} from {values[1]:g}, which is {away}"
        )

    try:
        from jax_privacy import noise_addition
    except ImportError:
        print("jax-privacy is not installed")
    else:
        # All that `jax.random.normal` makes of its 23 bits.
        bits, least = jnp.arange(2**23, dtype=jnp.uint32), jnp.nextafter(jnp.float32(-1), 0)
        unit = jax.lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), jnp.float32) - 1
        draws = np.asarray(np.float32(2**0.5) * jax.lax.erf_inv(unit * (1 - least) + least))
        other = noise_addition.gaussian_privatizer(stddev=float(std), prng_key=dpx.secret_key())
        total = jnp.full(size, values[0])
        noisy = np.asarray(other.update(total, other.init(jnp.zeros(size)))[0])
        say("jax-privacy", [np.isin(noisy, value + std * draws).mean() for value in values])
    try:
        import torch  # type: ignore[import-not-found]
        from opacus.optimizers.optimizer import _generate_noise  # type: ignore[import-not-found]
    except ImportError:
        print("Opacus is not installed")
    else:
        for name, secure in (("Opacus", False), ("Opacus in secure mode", True)):
            total = torch.full((size,), float(values[0]))
            noise = _generate_noise(float(std), total, secure_mode=secure)
            # Secure mode adds up four draws, which may come to any float.
            scale = None if secure else std
            noisy = (total + noise).numpy()
            say(name, [_can_be_made(noisy, value, scale).mean() for value in values])


def _can_be_made(noisy: np.ndarray, value: np.float32, scale: np.float32 | None) -> np.ndarray:
    """Whether value + n, in 32 bits, is what was released for some float n, itself scale times another."""
    n = (noisy.astype(np.float64) - value).astype(np.float32)
    up, down = np.float32(np.inf), np.float32(-np.inf)
    for _ in range(4):
        n = np.nextafter(n, down)
    found = np.zeros(len(noisy), bool)
    for _ in range(9):
        z = n / (scale or np.float32(1))
        beside = (z, np.nextafter(z, up), np.nextafter(z, down))
        drawn = True if scale is None else np.any([scale * y == n for y in beside], axis=0)
        found |= drawn & (value + n == noisy)
        n = np.nextafter(n, up)
    return found


def main(argv: list[str]) -> None:
    del argv
    if SECURE.value:
        streams(SECURE.value)
        return
    speed()
    streams(SIZE.value)
    cost()
    attack()
    floats()


if __name__ == "__main__":
    app.run(main)
