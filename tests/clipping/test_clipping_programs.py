"""Random losses, put together from what models do to weights and with them, against `vmap(grad)`."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, per_example

from dpx import clipping
from dpx.clipping.gradients import plan

WIDTH, LENGTH, BATCH = 8, 3, 4
LOWER = np.tril(np.ones((WIDTH, WIDTH), np.float32))
NUMBERS = ("NHC", "HIO", "NHC")


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)


def straight_through(w):
    return w + jax.lax.stop_gradient(jnp.round(w) - w)


# Weight, and a learned vector, -> a weight of the same shape.
CHANGES = {
    "transposed": lambda w, g: w.T,
    "scaled": lambda w, g: 2.5 * w,
    "divided": lambda w, g: -w / 2.5,
    "rows scaled": lambda w, g: w * jnp.linspace(0.5, 2, WIDTH)[:, None],
    "scale learned": lambda w, g: w * g,
    "masked": lambda w, g: w * LOWER,
    "masked by where": lambda w, g: jnp.where(LOWER > 0, w, 0.1),
    "tanh": lambda w, g: jnp.tanh(w),
    "exp": lambda w, g: jnp.exp(w) / 4,
    "weight norm": lambda w, g: g * w / jnp.linalg.norm(w, axis=0, keepdims=True),
    "one norm": lambda w, g: w / jnp.linalg.norm(w),
    "standardised": lambda w, g: (w - w.mean(0)) / jnp.sqrt(w.var(0) + 0.1),
    "rounded": lambda w, g: straight_through(w),
    "reversed": lambda w, g: w[::-1],
    "heads moved": lambda w, g: w.reshape(WIDTH, 2, WIDTH // 2).transpose(0, 2, 1).reshape(w.shape),
    "joined": lambda w, g: jnp.concatenate([w[3:], w[:3]]),
    "padded": lambda w, g: jnp.pad(w[:5], ((0, WIDTH - 5), (0, 0))),
    "symmetric": lambda w, g: w + w.T,
    "summed up": lambda w, g: jnp.cumsum(w, 0) / 2,
    "clipped": lambda w, g: jnp.clip(w, -0.3, 0.3),
}


def by_hand(h, w):
    product = jax.custom_vjp(lambda h, w: h @ w)
    product.defvjp(lambda h, w: (h @ w, (h, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return product(h, w)


def indices(h):
    return jnp.abs(jnp.round(3 * h[:, 1])).astype(int) % WIDTH


def blocks(h, w):
    def body(c, v):
        return jnp.sin(c @ (v * 0.75) - c @ (-v / 3).T), None

    return jax.lax.scan(body, h, jnp.stack([w, w / 2]))[0]


def loops_in_loops(h, w):
    def inner(c, x):
        return jax.lax.scan(lambda d, y: (jnp.sin(d @ w / 4 + x * y), None), c, h)[0], None

    return h + jax.lax.scan(inner, jnp.ones(WIDTH), h)[0]


def convolution(h, kernel, channels):
    """A convolution over positions of the first channels, in as many groups as they fill the kernel's."""
    return jax.lax.conv_general_dilated(
        h[None, :, :channels], kernel, (1,), "SAME",
        feature_group_count=channels // kernel.shape[1], dimension_numbers=NUMBERS,
    )[0]  # fmt: skip


def fourier(h, w):
    """A complex weight for each frequency, its parts from one real array."""
    parts = w.reshape(2, 4, 4, 2)
    weight = parts[0] + 1j * parts[1]
    spectrum = jnp.fft.rfft(h, axis=1)[:, :4]
    found = jnp.einsum("li,iof->of", spectrum, weight)
    return h + jnp.fft.irfft(found, 8, axis=0).sum(1)


# Positions (L, D), weight (D, D) -> positions.
USES = {
    "product": lambda h, w: h @ w,
    "transposed": lambda h, w: h @ w.T,
    "twice": lambda h, w: jnp.tanh(h @ w) @ w.T,
    "sum of both": lambda h, w: h @ w + h @ w.T,
    "heads": lambda h, w: jnp.einsum("ld,dhe->lhe", h, w.reshape(WIDTH, 2, 4)).reshape(h.shape),
    "heads joined": lambda h, w: jnp.einsum(
        "lhe,dhe->ld", jnp.sin(h.reshape(-1, 2, 4)), w.reshape(WIDTH, 2, 4)
    ),
    "batch axes": lambda h, w: jnp.einsum(
        "lgd,gde->lge", h.reshape(-1, 2, 4), w.reshape(2, 4, 8)[..., :4]
    ).reshape(h.shape),
    "both sides": lambda h, w: h * jnp.einsum("ld,de,le->l", h, w, h)[:, None],
    "parts": lambda h, w: h[:, :4] @ w[:4] + h[:, 4:] @ w[4:],
    "looked up": lambda h, w: h + w[indices(h)],
    "tied": lambda h, w: jax.nn.softmax(jnp.sin(w[indices(h)]) @ w.T),
    "columns looked up": lambda h, w: h + w[:, indices(h)].T,
    "filled": lambda h, w: h + jnp.take(w, 3 * indices(h), axis=0, mode="fill", fill_value=0),
    "slice that moves": lambda h, w: (
        h + jax.lax.dynamic_slice(w, (jnp.argmax(h[:, 0]), 0), (1, WIDTH))
    ),
    "recurrence": lambda h, w: jax.lax.scan(
        lambda c, x: (jnp.sin(c @ w + x), c @ w), jnp.ones(WIDTH), h
    )[1],
    "recurrence under remat": lambda h, w: jax.lax.scan(
        jax.checkpoint(lambda c, x: (jnp.sin(c @ w + x), c)), jnp.ones(WIDTH), h
    )[1],
    "blocks": blocks,
    "loops in loops": loops_in_loops,
    "repeated": lambda h, w: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c @ w), h),
    "remat": lambda h, w: jax.checkpoint(lambda h, w: jnp.sin(h @ w) @ w)(h, w),
    "remat that saves": lambda h, w: jax.checkpoint(
        lambda h, w: jnp.sin(h @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
    )(h, w),
    "branches": lambda h, w: jax.lax.cond(h[0, 0] > 0, lambda: h @ w, lambda: jnp.cos(h @ w.T)),
    "jit": lambda h, w: jax.jit(lambda h, w: jnp.sin(h @ w))(h, w),
    "vmap": lambda h, w: jax.vmap(lambda r: w @ r)(h),
    "map": lambda h, w: jax.lax.map(lambda r: r @ w, h),
    "derivative by hand": by_hand,
    "convolution": lambda h, w: h + convolution(h, w.reshape(4, 2, 8)[:3], 2),
    "convolution in groups": lambda h, w: h + convolution(h, w.reshape(4, 2, 8)[:2], 8),
    "fourier": fourier,
    "one row": lambda h, w: h + w[1],
    "gate": lambda h, w: h * jax.nn.sigmoid(h @ w),
    "diagonal": lambda h, w: h * jnp.diag(w),
    "added": lambda h, w: h + w[: len(h)],
}
PENALTIES = {
    "none": lambda p, x: 0.0,
    "l2": lambda p, x: 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "norm": lambda p, x: 0.1 * jnp.linalg.norm(p["w0"]),
    "of an example": lambda p, x: x[0, 0] * jnp.sum(jnp.square(p["w0"][:3])),
}


def program(seed):
    """A loss, its parameters, a batch, and in words what it does."""
    pick, rng = random.Random(seed), np.random.default_rng(seed)
    count = pick.randint(1, 3)
    params = {f"w{i}": normal(rng, WIDTH, WIDTH) for i in range(count)} | {"g": normal(rng, WIDTH)}
    steps = [
        (
            f"w{pick.randrange(count)}",
            [pick.choice(list(CHANGES)) for _ in range(pick.choice((0, 0, 1, 1, 2)))],
            pick.choice(list(USES)),
        )
        for _ in range(pick.randint(1, 4))
    ]
    penalty = pick.choice(list(PENALTIES))

    def loss(p, x):
        h = x
        for name, changes, use in steps:
            w = p[name]
            for change in changes:
                w = CHANGES[change](w, p["g"])
            h = jnp.sin(USES[use](h, w))
        out = jnp.sum(h * jnp.cos(jnp.arange(h.size).reshape(h.shape)))
        return out + PENALTIES[penalty](p, x)

    return loss, params, normal(rng, BATCH, LENGTH, WIDTH), (steps, penalty)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 80))]
)
def test_random_programs(monkeypatch, seed):
    pick = random.Random(~seed)
    favor = pick.choice((0.0, 1.5, 1e9))
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    options = {
        "method": pick.choice(("one_pass", "one_pass", "auto", "two_pass")),
        "microbatch_size": pick.choice((None, None, 1, 3)),
    }
    loss, params, x, words = program(seed)
    expected = per_example(loss, params, (x,))
    norms = np.sqrt(sum(np.square(g).reshape(BATCH, -1).sum(1) for g in expected))
    clip = float(0.7 * np.median(norms))
    fn = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=clip, **options))
    try:
        check(fn(params, x), expected, clip)
    except AssertionError as error:
        error.add_note(f"{words} {options} {favor}")
        raise
