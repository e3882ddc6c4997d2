"""What models do to a weight and with it: each alone, and random losses that are put together from them."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import check, is_exact, norms_of, per_example, without_rule
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from dpx import clipping
from dpx.clipping.gradients import plan

pytestmark = pytest.mark.filterwarnings("ignore:no gradient of loss_fn reaches")

WIDTH, LENGTH, BATCH = 8, 3, 4
LOWER = np.tril(np.ones((WIDTH, WIDTH), np.float32))
NUMBERS = ("NHC", "HIO", "NHC")
FIXED = np.random.default_rng(7).normal(size=(WIDTH, WIDTH)).astype("f4") / 2


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)


def straight_through(w):
    return w + jax.lax.stop_gradient(jnp.round(w) - w)


@jax.custom_vjp
def rounded(w):
    """Weights rounded to a scale for each column, with the derivative of the identity."""
    scale = jnp.max(jnp.abs(w), 0) / 7
    return jnp.round(w / scale) * scale


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


def wrapped(w):
    """A name, a barrier and a sharding constraint."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    anywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w, _ = lax.optimization_barrier((checkpoint_name(w, "w"), 2 * w))
    return lax.with_sharding_constraint(w, anywhere)


def spectral_norm(w):
    """Two power iterations that are not differentiated, and the derivative of the norm itself."""
    u = jnp.ones(WIDTH)
    for _ in range(2):
        v = w.T @ u
        u = w @ (v / jnp.linalg.norm(v))
        u = u / jnp.linalg.norm(u)
    u, v = lax.stop_gradient((u, v / jnp.linalg.norm(v)))
    return w / (u @ w @ v)


def fourth(w, g):
    """A scale for each four inputs of a column: it varies over rows and columns at once."""
    scale = jnp.exp(jnp.outer(jnp.arange(2.0), g))
    return (w.reshape(2, 4, WIDTH) * scale[:, None]).reshape(w.shape)


# Weight, and a learned vector, -> a weight of the same shape.
CHANGES = {
    "transposed": lambda w, g: w.T,
    "scaled": lambda w, g: 2.5 * w,
    "divided": lambda w, g: -w / 2.5,
    "rows scaled": lambda w, g: w * jnp.linspace(0.5, 2, WIDTH)[:, None],
    "scale learned": lambda w, g: w * g,
    "scale of rows learned": lambda w, g: w * g[:, None],
    "scale of some entries": lambda w, g: w * jnp.where(LOWER > 0, jnp.broadcast_to(g, w.shape), 0),
    "scales of groups": fourth,
    "one number learned": lambda w, g: w / jnp.linalg.norm(w) * g[0],
    "scale learned, beside itself": lambda w, g: w * g + jnp.tanh(w),
    "scale learned, moved": lambda w, g: w * g + 0.3,
    "masked": lambda w, g: w * LOWER,
    "masked by columns": lambda w, g: w * LOWER[2],
    "masked by where": lambda w, g: jnp.where(LOWER > 0, w, 0.1),
    "tanh": lambda w, g: jnp.tanh(w),
    "exp": lambda w, g: jnp.exp(w) / 4,
    "weight norm": lambda w, g: g * w / jnp.linalg.norm(w, axis=0, keepdims=True),
    "weight norm of rows": lambda w, g: g[:, None] * w / jnp.linalg.norm(w, axis=1, keepdims=True),
    "weight norm, turned": lambda w, g: (
        (w.T / jnp.linalg.norm(w.T, axis=1, keepdims=True) * g[:, None]).T
    ),
    "one norm": lambda w, g: w / jnp.linalg.norm(w),
    "spectral norm": lambda w, g: spectral_norm(w),
    "standardised": lambda w, g: (w - w.mean(0)) / jnp.sqrt(w.var(0) + 0.1),
    "rounded": lambda w, g: straight_through(w),
    "rounded by columns": lambda w, g: rounded(w),
    "reversed": lambda w, g: w[::-1],
    "heads moved": lambda w, g: w.reshape(WIDTH, 2, WIDTH // 2).transpose(0, 2, 1).reshape(w.shape),
    "joined": lambda w, g: jnp.concatenate([w[3:], w[:3]]),
    "padded": lambda w, g: jnp.pad(w[:5], ((0, WIDTH - 5), (0, 0))),
    "parts of parts": lambda w, g: jnp.pad(w[1:][:-2][:, 2:][:, 1:], ((0, 3), (3, 0))),
    "symmetric": lambda w, g: w + w.T,
    "residual": lambda w, g: w + jnp.eye(WIDTH),
    "summed up": lambda w, g: jnp.cumsum(w, 0) / 2,
    "clipped": lambda w, g: jnp.clip(w, -0.3, 0.3),
    "times a mixture that is frozen": lambda w, g: w @ FIXED,
    "mixed by what is frozen": lambda w, g: FIXED @ w,
    "wrapped": lambda w, g: wrapped(w),
}


def by_hand(h, w):
    product = jax.custom_vjp(lambda h, w: h @ w)
    product.defvjp(lambda h, w: (h @ w, (h, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return product(h, w)


@jax.custom_vjp
def quantised(x, w, most_x, most_w):
    """A product of 4-bit integers, with the derivative of an ordinary one."""
    x, w = (jnp.round(y / (most / 7)).astype(jnp.int8) for y, most in ((x, most_x), (w, most_w)))
    product = jnp.matmul(x, w, preferred_element_type=jnp.int32)
    return product * (most_x / 7) * (most_w / 7)


def quantised_backward(kept, g):
    x, w = kept
    zeros = jnp.zeros((*x.shape[:1], 1)), jnp.zeros((1, w.shape[1]))
    return (g @ w.T, (g.T @ x).T, *zeros)


quantised.defvjp(lambda x, w, *most: (quantised(x, w, *most), (x, w)), quantised_backward)


def in_integers(x, w):
    largest = functools.partial(jnp.max, keepdims=True)
    return quantised(x, w, largest(jnp.abs(x), axis=1), largest(jnp.abs(w), axis=0))


def rounded_backwards(h, w):
    """A weight for each head, whose factors are rounded to bfloat16 in the backward pass."""

    @jax.custom_vjp
    def product(x, w):
        return jnp.einsum("lhd,hde->lhe", x, w)

    def backward(kept, g):
        x, w = (y.astype(jnp.bfloat16).astype(jnp.float32) for y in kept)
        return jnp.einsum("lhe,hde->lhd", g, w), jnp.einsum("lhd,lhe->hde", x, g / 3)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return product(h.reshape(-1, 2, 4), w.reshape(2, 4, WIDTH)).sum(1)


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


def passed_through(h, w):
    """A rematerialised, scanned body that returns the weight that it was given."""

    @jax.checkpoint
    def body(carry, x):
        w, c = carry
        return (w, jnp.tanh(c @ w + x)), None

    (w, c), _ = lax.scan(body, (w, h[0]), h)
    return h + c @ w


def gates_joined(h, w):
    """An LSTM's gates, whose kernels are joined into one product."""
    kernel = jnp.concatenate([w, w.T], axis=1)

    def step(c, x):
        gate, new = jnp.split(jnp.concatenate([x, c]) @ jnp.concatenate([kernel, 2 * kernel]), 2)
        return jax.nn.sigmoid(gate) * jnp.tanh(new), None

    return h + lax.scan(step, jnp.zeros(WIDTH), h)[0]


def attention(h, w):
    """Queries, keys and values of one weight, split and reshaped to heads."""
    q, k, v = jnp.split(w[:, :6], 3, axis=1)
    weights = jax.nn.softmax((h @ q) @ (h @ k).T)
    return h + jnp.pad(weights @ (h @ v), ((0, 0), (0, WIDTH - 2)))


def in_two_lengths(h, w):
    """As in an encoder and a decoder, whose positions are not as many."""
    return jnp.tanh(h @ w) + jnp.sin(jnp.tanh(h[1:] @ w) @ w).sum(0)


def convolution(h, kernel, channels):
    """A convolution over positions of the first channels, in as many groups as they fill the kernel's."""
    return jax.lax.conv_general_dilated(
        h[None, :, :channels], kernel, (1,), "SAME",
        feature_group_count=channels // kernel.shape[1], dimension_numbers=NUMBERS,
    )[0]  # fmt: skip


def shared_by_a_scan(h, w):
    """One depthwise kernel for every step of a scan."""
    kernel = w.reshape(WIDTH, 1, WIDTH)[:3]
    return lax.scan(lambda h, _: (jnp.tanh(convolution(h, kernel, WIDTH)), None), h, length=3)[0]


def batch_groups(h, w):
    both = jnp.stack([h, jnp.sin(h)])[:, :, :4]
    options = {"dimension_numbers": NUMBERS, "batch_group_count": 2}
    return h + lax.conv_general_dilated(both, w.reshape(2, 4, 8), (1,), "SAME", **options)[0]


def image_of_a_parameter(h, w):
    """A convolution of a weight with a kernel of the example's own has no rule."""
    own = jnp.sin(2.0 * h[:, :, None] * jnp.arange(1.0, 1 + WIDTH))
    image = lax.conv_general_dilated(w[None], own, (1,), "SAME", dimension_numbers=NUMBERS)
    return h + image[0, :LENGTH]


def fourier(h, w):
    """A complex weight for each frequency, its parts from one real array."""
    parts = w.reshape(2, 4, 4, 2)
    weight = parts[0] + 1j * parts[1]
    spectrum = jnp.fft.rfft(h, axis=1)[:, :4]
    found = jnp.einsum("li,iof->of", spectrum, weight)
    return h + jnp.fft.irfft(found, 8, axis=0).sum(1)


def branch_in_a_block(h, w):
    return lax.cond(h[0, 0] > 0, jax.checkpoint(lambda h, w: jnp.sin(h @ w)), lambda h, w: h, h, w)


def solved(by):
    """A block that ends in the solution of a system of equations."""

    def block(h, w):
        matrix = jnp.eye(LENGTH) + jnp.tanh(h @ w) @ jnp.tanh(h @ w).T / WIDTH
        return by(matrix, h @ w)

    return jax.checkpoint(block)


def iterated(matrix, y):
    return jax.scipy.sparse.linalg.cg(lambda z: matrix @ z, y, tol=1e-3)[0]


def in_a_block(function):
    return lambda h, w: jax.checkpoint(lambda h, w: function(h @ w))(h, w)


def printed(h, w):
    jax.debug.print("weight {w}", w=w[0, 0])
    return h @ w


def written(h, w):
    """What a recomputed block returns, changed in place."""
    hidden = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, w)
    ref = jax.new_ref(jnp.zeros_like(hidden))
    ref[...] = hidden
    ref[0] = ref[0] * 2
    return jnp.tanh(ref[...])


def equalised(h, w):
    """A weight that is divided by a number wherever it is used."""
    body = jax.checkpoint(lambda h, _: (jnp.sin(h @ (0.5 * w) + h @ (-(w / 3.0)).T), None))
    h = lax.scan(body, h, length=2)[0]
    return h + convolution(h, w.reshape(2, 4, 8) * 2.0, 4) + (w * 4.0)[jnp.array([1, 0, 1])]


def added_in_a_loop(h, w):
    """A sum of weights, in a loop."""
    return lax.scan(lambda h, _: (jnp.sin(h @ (w + w.T) - h @ (w - 2 * w)), None), h, length=2)[0]


def of_nothing(h, w):
    """No layers, no rows, no channels, nothing to map over, and a sum in a block that splits into nothing."""
    h = lax.scan(lambda c, v: (jnp.sin(c @ w + v), c @ w), h, w[:0])[0]
    rows = lax.dynamic_slice(w, (jnp.argmax(h[0]), 0), (0, WIDTH))
    mapped = jax.vmap(lambda row: jnp.sin(row @ w))(h[:0])
    channels = lax.conv_general_dilated(
        h[None, :, :0], w[None, :0], (1,), "SAME", dimension_numbers=NUMBERS
    )
    summed = jax.checkpoint(lambda w: lax.associative_scan(jnp.add, w[:3]))
    sums = lax.map(lambda row: row @ summed(w)[jnp.arange(WIDTH) % 3], h)
    return sums + rows.sum() + mapped.sum() + channels[0]


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
    "an axis of length one": lambda h, w: jnp.einsum("bld,kde->lke", h[None], w[None])[:, 0],
    "both sides": lambda h, w: h * jnp.einsum("ld,de,le->l", h, w, h)[:, None],
    "beside what all examples share": lambda h, w: jnp.sin(h) * (FIXED[:LENGTH] @ w),
    "parts": lambda h, w: h[:, :4] @ w[:4] + h[:, 4:] @ w[4:],
    "a product of nothing": lambda h, w: h @ w + (h[:, :0] @ w[:0]),
    "of nothing": of_nothing,
    "attention": attention,
    "in two lengths": in_two_lengths,
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
    "passed through": passed_through,
    "gates joined": gates_joined,
    "repeated": lambda h, w: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c @ w), h),
    "sums of weights in a loop": added_in_a_loop,
    "equalised": equalised,
    "remat": lambda h, w: jax.checkpoint(lambda h, w: jnp.sin(h @ w) @ w)(h, w),
    "remat that saves": lambda h, w: jax.checkpoint(
        lambda h, w: jnp.sin(h @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
    )(h, w),
    "remat of a square": lambda h, w: jax.checkpoint(jnp.square)(h @ w + w[0]),
    **{
        f"{function.__name__} in a block": in_a_block(function)
        for function in (jax.nn.relu, jax.nn.softmax, jax.nn.softplus, jax.nn.silu)
    },
    "solved in a block": solved(jnp.linalg.solve),
    "solved step by step in a block": solved(iterated),
    "branches": lambda h, w: jax.lax.cond(h[0, 0] > 0, lambda: h @ w, lambda: jnp.cos(h @ w.T)),
    "branch in a block": branch_in_a_block,
    "jit": lambda h, w: jax.jit(lambda h, w: jnp.sin(h @ w))(h, w),
    "vmap": lambda h, w: jax.vmap(lambda r: w @ r)(h),
    "map": lambda h, w: jax.lax.map(lambda r: r @ w, h),
    "derivative by hand": by_hand,
    "in integers": in_integers,
    "in integers, transposed and tied": lambda h, w: (
        in_integers(jnp.tanh(in_integers(h, w.T)), w) @ w
    ),
    "rounded backwards": rounded_backwards,
    "convolution": lambda h, w: h + convolution(h, w.reshape(4, 2, 8)[:3], 2),
    "convolution in groups": lambda h, w: h + convolution(h, w.reshape(4, 2, 8)[:2], 8),
    "convolution that a scan shares": shared_by_a_scan,
    "convolution in groups of a batch": batch_groups,
    "image of a parameter": image_of_a_parameter,
    "fourier": fourier,
    "one row": lambda h, w: h + w[1],
    "rows at a distance": lambda h, w: h + w[1::3],
    "gate": lambda h, w: h * jax.nn.sigmoid(h @ w),
    "diagonal": lambda h, w: h * jnp.diag(w),
    "added": lambda h, w: h + w[: len(h)],
    "printed": printed,
    "written to an array": written,
}
PENALTIES = {
    "none": lambda p, x: 0.0,
    "l2": lambda p, x: 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "norm": lambda p, x: 0.1 * jnp.linalg.norm(p["w0"]),
    "of an example": lambda p, x: x[0, 0] * jnp.sum(jnp.square(p["w0"][:3])),
    "absolute": lambda p, x: x[0, 0] * jnp.sum(jnp.abs(p["w0"])),
    "two": lambda p, x: (
        x[0, 0] * jnp.sum(p["w0"] ** 2) + x[0, 1] * jnp.sum(jnp.abs(p["w0"])) + jnp.sum(p["g"])
    ),
    "cubes": lambda p, x: x[0, 0] * jnp.sum(p["w0"] * p["w0"] * p["w0"]),
    "group lasso": lambda p, x: x[0, 0] * jnp.sum(jnp.linalg.norm(p["w0"], axis=1)),
    "trace of the square": lambda p, x: x[0, 0] * jnp.sum(p["w0"] * p["w0"].T),
}


def loss_of(steps, penalty="none"):
    """A loss that changes weights and uses them, one step after the other: (name, changes, use)."""

    def loss(p, x):
        h = x
        for name, changes, use in steps:
            w = p[name]
            for change in changes:
                w = CHANGES[change](w, p["g"])
            h = jnp.sin(USES[use](h, w))
        out = jnp.sum(h * jnp.cos(jnp.arange(h.size).reshape(h.shape)))
        return out + PENALTIES[penalty](p, x)

    return loss


def drawn(count, seed=0):
    """Parameters, and a batch."""
    rng = np.random.default_rng(seed)
    params = {f"w{i}": normal(rng, WIDTH, WIDTH) for i in range(count)}
    return params | {"g": normal(rng, WIDTH)}, normal(rng, BATCH, LENGTH, WIDTH)


def in_a_loop(change):
    """Layers of which each uses its own changed weight."""

    def loss(p, x):
        def layer(h, w):
            return jnp.sin(h @ CHANGES[change](w, p["g"])), None

        h = lax.scan(layer, x, p["w"])[0]
        return jnp.sum(h * jnp.cos(jnp.arange(h.size).reshape(h.shape)))

    rng = np.random.default_rng(0)
    _, x = drawn(0)
    return loss, {"w": normal(rng, 3, WIDTH, WIDTH), "g": normal(rng, WIDTH)}, (x,)


def once(changes=(), use="product", penalty="none"):
    params, x = drawn(1)
    return loss_of([("w0", changes, use)], penalty), params, (x,)


# What is done to one weight.
CONSTRUCTS = {
    **{f"{name}, multiplied": functools.partial(once, [name]) for name in CHANGES},
    **{f"{name}, in a loop": functools.partial(in_a_loop, name) for name in CHANGES},
    **{
        f"{name}, tied": functools.partial(once, [name], "tied")
        for name in ("tanh", "weight norm of rows")
    },
    **{f"used: {name}": functools.partial(once, use=name) for name in USES},
    **{f"penalty: {name}": functools.partial(once, penalty=name) for name in PENALTIES},
}


@pytest.mark.quick_cases(
    "masked, multiplied-one_pass", "weight norm, multiplied-one_pass", "tanh, in a loop-two_pass",
    "standardised, multiplied-auto", "used: tied-two_pass", "used: gates joined-one_pass",
    "used: written to an array-two_pass", "used: of nothing-one_pass",
    "used: solved in a block-two_pass", "penalty: two-one_pass",
)  # fmt: skip
@pytest.mark.parametrize("how", ["one_pass", "two_pass", "auto"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_norms_and_sums_are_exact(name, how):
    is_exact(*CONSTRUCTS[name](), how)


CHANGES_WITHOUT_RULE = (
    "scale of some entries", "scales of groups", "one number learned", "scale learned, beside itself",
    "masked", "masked by where", "tanh", "exp", "weight norm", "weight norm of rows", "weight norm, turned",
    "one norm", "standardised", "reversed", "summed up", "clipped",
)  # fmt: skip
WITHOUT_RULE = {
    *(
        f"{name}, {where}"
        for name in CHANGES_WITHOUT_RULE
        for where in ("multiplied", "in a loop", "tied")
    ),
    *(f"penalty: {name}" for name in PENALTIES if name not in ("none", "of an example")),
    *(f"used: {name}" for name in ("blocks", "passed through", "branches")),
    *(f"used: {name}" for name in ("branch in a block", "diagonal")),
}


@pytest.mark.quick_cases(
    "wrapped, multiplied", "masked, multiplied", "parts of parts, in a loop", "used: equalised",
    "used: gates joined", "used: convolution in groups of a batch", "used: printed", "used: of nothing",
)  # fmt: skip
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_rule_of_a_weight_is_explained(name):
    assert bool(without_rule(*CONSTRUCTS[name]()) - {"g"}) == (name in WITHOUT_RULE)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 80))]
)
def test_random_programs_are_exact(monkeypatch, seed):
    pick = random.Random(seed)
    count = pick.randint(1, 3)
    steps = [
        (
            f"w{pick.randrange(count)}",
            [pick.choice(list(CHANGES)) for _ in range(pick.choice((0, 0, 1, 1, 2)))],
            pick.choice(list(USES)),
        )
        for _ in range(pick.randint(1, 4))
    ]
    penalty = pick.choice(list(PENALTIES))
    pick = random.Random(~seed)
    favor = pick.choice((0.0, 1.5, 1e9))
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    options = {
        "method": pick.choice(("one_pass", "one_pass", "auto", "two_pass")),
        "microbatch_size": pick.choice((None, None, 1, 3)),
    }
    loss, (params, x) = loss_of(steps, penalty), drawn(count, seed)
    expected = per_example(loss, params, (x,))
    clip = float(0.7 * np.median(norms_of(expected)))
    fn = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=clip, **options))
    try:
        check(fn(params, x), expected, clip)
    except AssertionError as error:
        error.add_note(f"{steps} {penalty} {options} {favor}")
        raise
