"""Losses of several parameters, of tables and of unusual arrays: norms and sums are those of autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import check, equations, is_exact, normal, per_example, without_rule
from clipping_models import next_token_loss, tokens
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from xla_flags import USUAL_KERNELS

from dpx import clipping
from dpx.clipping.gradients import plan
from dpx.clipping.gradients.convolution import Convolution

IN, OUT, LENGTH, BATCH = 12, 9, 3, 4
X = normal(BATCH, LENGTH, IN, seed=1)
IDS = np.array([[0, 1, 0, 5], [2, 2, 2, 2], [11, 3, 4, 3]])
NUMBERS = ("NHC", "HIO", "NHC")
CONSTRUCTS = {}


def construct(*batch, **parameters):
    """Adds a loss to the constructs. Of a parameter that is not given as an array the shape is given."""

    def add(loss):
        params = {k: normal(*v) if isinstance(v, tuple) else v for k, v in parameters.items()}
        CONSTRUCTS[loss.__name__.strip("_")] = loss, params, batch or (X,)
        return loss

    return add


def ending(h):
    return jnp.sum(jnp.sin(h) * jnp.sin(1.0 + jnp.arange(h.size)).reshape(h.shape))


# Functions of weights, beside other uses of them.


@construct(w=(3, 4, 5))
def scaled_between_cyclic_transposes(p, x):
    """A fixed scale along an axis that two transposes move to and from another place."""
    scale = np.linspace(0.5, 2, 4, dtype="f4")[:, None, None]
    w = jnp.transpose(jnp.transpose(p["w"], (1, 2, 0)) * scale, (2, 0, 1)) * scale[:3]
    return ending(x @ w.reshape(IN, 5))


@construct(w=np.exp(normal(IN, IN)))
def divided_by_a_weight(p, x):
    """Neither a number over a weight nor the derivative of its logarithm is a multiple of it."""
    return ending(x @ (2.0 / p["w"])) - x[0, 0] * jnp.sum(jnp.log(p["w"]))


@construct(w=(2, 6, 3, 4), s=(2, 6, 3))
def scales_of_groups_used_twice(p, x):
    """A weight of each head, scaled over its rows and columns at once, as it is and transposed."""
    w = p["s"][..., None] * p["w"] / 3
    h = jnp.einsum("lhd,hdge->lhge", x.reshape(LENGTH, 2, 6), w)
    return ending(jnp.einsum("lhge,hdge->lhd", jnp.sin(h), w))


@construct(normal(BATCH, IN), w=(OUT, IN, 4), s=(OUT, IN))
def scaled_basis(p, x):
    """Coefficients of functions of each input, and a scale for each pair of input and output: a KAN."""
    basis = jnp.stack([jnp.sin(n * x) for n in range(1, 5)], -1)
    w = (p["w"] * p["s"][..., None]).reshape(OUT, 4 * IN)
    return jnp.sum(jnp.sin(basis.reshape(-1, 4 * IN) @ w.T))


@construct(w=(IN, IN))
def residual_with_penalty(p, x):
    """A product with the weight and the identity says nothing of that with the weight alone."""
    return ending(x @ (p["w"] + jnp.eye(IN))) + x[0, 0] * jnp.sum(p["w"] ** 2)


@construct(w=(IN, OUT))
def two_functions(p, x):
    return jnp.sum(jnp.sin(x @ jnp.exp(p["w"]))) + jnp.sum(jnp.cos(x @ jnp.tanh(p["w"])))


@construct(w=(IN, OUT))
def of_several_results(p, x):
    """An LU decomposition, of which one result is a small value and the loss takes others too."""
    gram = p["w"].T @ p["w"] + jnp.eye(OUT)
    return jnp.sum(jnp.linalg.solve(gram, x[0, :OUT]) * x[1, :OUT]) + 0.1 * jnp.sum(p["w"] ** 2)


@construct(w=(IN, 7), v=(IN, 2), u=(IN, 3))
def a_part_that_is_joined_with_something_else(p, x):
    """No single padding makes a parameter of a whole of which a part of it is a part."""
    return ending(x @ jnp.concatenate([p["v"], p["w"][:, 3:6], p["u"]], axis=1))


@construct(normal(BATCH, 9, 8), re=(8, 6, 5), im=(8, 6, 5))
def complex_weights(p, x):
    """Fourier operators."""
    found = jnp.einsum("li,iom->lo", jnp.fft.rfft(x, axis=0), lax.complex(p["re"], p["im"]) / 2.0)
    return jnp.sum(jnp.sin(jnp.real(found))) + jnp.sum(jnp.abs(found) ** 2)


@construct(normal(BATCH, 9, 8), re=(8, 6, 5), im=(8, 6, 5))
def complex_weights_that_are_looked_up(p, x):
    found = (p["re"] - (1j * p["im"]))[jnp.argmax(x, 1)]
    return jnp.sum(jnp.sin(jnp.real(found))) + jnp.sum(jnp.abs(found) ** 2)


@construct(w=(IN, IN), v=(IN, IN))
def penalties_before_and_behind_blocks(p, x):
    """What leads on to a weight from a penalty is asked for in both passes, wherever blocks end."""
    h = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, p["w"])
    return jnp.sum((h @ p["v"]) ** 2) + x[0, 0] * (jnp.sum(p["w"] ** 2) + jnp.sum(p["v"] ** 2))


@construct(w=(IN, IN), unused=(IN, IN))
def a_weight_that_only_a_penalty_uses(p, x):
    h = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, p["w"])
    return jnp.sum(h) + x[0, 0] * jnp.sum(p["unused"] ** 2)


@construct(a=(IN, IN), w=(IN, OUT), scale=(OUT,))
def a_scaled_weight_behind_a_block(p, x):
    """Its scale needs cotangents from all of the loss, also where only one pass goes through its end."""
    h = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, p["a"])
    return jnp.sum(jnp.sin(h @ (p["w"] * jnp.exp(p["scale"]))) ** 2)


@construct(w=(IN, IN), a=(5, 5, 3), b=(5, 5, 2))
def sums_over_axes_in_another_order(p, x):
    h = jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, p["w"])
    product = jnp.tensordot(p["a"], p["b"], ((0, 1), (1, 0)))
    return jnp.sum(h**2) + x[0, 0] * jnp.sum(product**2)


@construct(w=(IN, IN), v=(IN, IN))
def what_is_called_twice(p, x):
    """Both calls hold the same traced function, and so the same variables."""
    layer = jax.jit(lambda w, x: jnp.sin(x @ w))
    return jnp.sum(layer(p["w"], x) * layer(p["v"], x) ** 2)


@construct(normal(BATCH, 2, LENGTH, IN), w=(IN, OUT), v=(IN, OUT))
def a_user_with_many_sequences(p, x):
    return ending(jax.vmap(lambda one: jnp.tanh(one @ p["w"]) @ p["v"].T @ p["w"])(x))


LENGTHS = {"a": 64, "b": 192, "c": 640, "d": 1100, "e": 3, "f": 1, "g": 2}


@construct(normal(BATCH, sum(LENGTHS.values())), **{name: (n,) for name, n in LENGTHS.items()})
def gradients_of_different_lengths(p, x):
    """Of which the short ones are normed as one array."""
    parts = jnp.split(x, np.cumsum(list(LENGTHS.values()))[:-1])
    return sum(jnp.sum(w * part) for w, part in zip(p.values(), parts, strict=True))


# Loops.


@construct(w=(3, IN, IN), scale=(IN,))
def scaled_by_what_a_loop_shares(p, x):
    x, _ = lax.scan(lambda x, w: (jnp.sin(x @ (w * jnp.exp(p["scale"]))), None), x, p["w"])
    return jnp.sum(x**2)


@construct(w=(3, IN, IN), v=(3, IN, IN), u=(IN, IN))
def functions_of_slices_and_of_what_a_loop_shares(p, x):
    def step(x, layer):
        w, v = layer
        return jnp.sin(x @ jnp.tril(w) @ jnp.tril(p["u"])) @ jnp.tanh(v), None

    return jnp.sum(lax.scan(step, x, (p["w"], p["v"]), reverse=True, unroll=2)[0] ** 2)


@construct(w=(IN, IN))
def a_cell_whose_states_come_out(p, x):
    def step(h, x):
        h = jnp.sin(h @ jnp.tril(p["w"]) + x)
        return h, jnp.sum(h)

    h, sums = lax.scan(step, jnp.zeros(IN), x)
    return jnp.sum(h**2) + jnp.sum(sums**2)


@construct(start=(IN,), w=(IN, IN))
def a_carry_that_starts_as_a_weight(p, x):
    """What is made of it stays in the loop."""
    h, _ = lax.scan(lambda h, x: (jnp.tanh(jnp.sin(h)) @ p["w"] + x, None), p["start"], x)
    return jnp.sum(h**2)


@construct(start=(IN, IN), w=(3, IN, IN))
def updated_in_every_step(p, x):
    """A weight that the loop adds to. Of what is added, the gradient is the sum that is carried so far."""

    def step(w, each):
        update, x = each
        w = w + update
        return w, jnp.sin(x @ w)

    return jnp.sum(lax.scan(step, p["start"], (p["w"], x))[1] ** 2)


@construct(start=(IN, IN), w=(3, IN, IN))
def updated_after_every_step(p, x):
    """The same after the step has used it: what is carried so far is handed out before it is added to."""

    def step(w, each):
        update, x = each
        return w + update, jnp.sin(x @ w)

    w, rows = lax.scan(step, p["start"], (p["w"], x))
    return jnp.sum(rows**2) + jnp.sum(jnp.sin(x @ w))


@construct(w=(3, IN, IN))
def several_results_of_which_some_leave_a_loop(p, x):
    recomputed = jax.checkpoint(lambda x, w: jnp.sin(x @ jnp.tanh(w)))

    def step(carry, w):
        x, total = carry
        left, right = jnp.split(jnp.tanh(w), 2, axis=1)
        x = jnp.concatenate([jnp.sin(x @ left), x @ jnp.cos(right)], 1)
        return (recomputed(x, w), total + jnp.sum(left)), (right[0, 0], jnp.exp(left[0]))

    (x, total), (corners, rows) = lax.scan(step, (x, 0.0), p["w"])
    return jnp.sum(x**2) + total * jnp.sum(corners) * jnp.sum(rows * x[:3, :6])


@construct(a=(IN, 0), b=(0, IN), stack=(0, IN, IN), w=(IN, IN))
def without_entries(p, x):
    """A layer of no units, and a loop of no layers."""
    x = x + jax.checkpoint(lambda x, a: (x @ a) @ p["b"])(x, p["a"])
    h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])[0]
    return jnp.sum(jax.checkpoint(lambda h, w: jnp.sin(h @ w))(h, p["w"])) + jnp.sum(x @ p["a"])


# Adapters that are merged with a weight.

WIDE = normal(8, LENGTH, 64)
WEIGHT = normal(64, 64)
ADAPTER = {"a": (64, 2), "b": (2, 64)}


def merged(p):
    return WEIGHT + 2.0 * (p["a"] @ p["b"])


def block(p, x):
    return jnp.sin(x @ merged(p))


@construct(WIDE, **ADAPTER)
def merged_with_a_scaled_adapter(p, x):
    return ending(x @ (WEIGHT + 2.0 * p["a"] @ p["b"]))


@construct(WIDE, **ADAPTER)
def merged_and_turned(p, x):
    return ending(jnp.einsum("ld,fd->lf", x, merged(p)))


@construct(WIDE, **ADAPTER)
def merged_twice(p, x):
    return ending(block(p, x) @ merged(p))


@construct(WIDE, **ADAPTER)
def merged_once_and_used_twice(p, x):
    w = merged(p)
    return ending(jnp.sin(x @ w) @ w)


@construct(WIDE, **ADAPTER)
def merged_between_a_weight_and_its_heads(p, x):
    return ending(jnp.einsum("ld,dhe->hle", x, merged(p).reshape(64, 4, -1)))


@construct(WIDE, a=(3, 64, 2), b=(3, 2, 64))
def merged_of_experts(p, x):
    """A weight for each of three experts, and an adapter of each."""
    w = jnp.stack([WEIGHT, WEIGHT.T, 2 * WEIGHT]) + jnp.einsum("edr,erf->edf", p["a"], p["b"])
    return ending(jnp.einsum("ld,edf->elf", x, w))


@construct(WIDE, **ADAPTER)
def merged_in_a_block(p, x):
    return ending(jax.checkpoint(block)(p, x))


@construct(WIDE, a=(4, 64, 2), b=(4, 2, 64))
def merged_in_a_scan_over_layers(p, x):
    return ending(lax.scan(lambda h, p: (block(p, h), None), x, p)[0])


@construct(WIDE, w=(64, 64))
def mixed_into_blocks(p, x):
    """Three blocks of a weight, each a mixture of four: both factors of a block's gradient count blocks."""
    blocks = jnp.einsum("bk,kdf->bdf", WEIGHT[:3, :4], p["w"].reshape(4, 16, 64))
    return ending(jnp.einsum("lbd,bdf->blf", x[:, :48].reshape(LENGTH, 3, 16), blocks))


# Convolutions.


def same(x, kernel, strides=(1, 1), **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=numbers, **options
    )


IMAGES = normal(BATCH, 5, 5, 3, seed=1)


@construct(IMAGES, w=(3, 3, 3, 4))
def a_convolution_with_a_mask(p, x):
    """It hides the pixels that come later: PixelCNN."""
    mask = np.ones((3, 3, 3, 4), np.float32)
    mask[1, 1:] = mask[2] = 0
    return ending(same(x[None], p["w"] * mask))


@construct(IMAGES, w=(3, 3, 1, 3))
def a_kernel_that_is_used_twice_and_multiplied(p, x):
    once = same(x[None], p["w"], feature_group_count=3)
    twice = same(once, p["w"], feature_group_count=3)
    return (twice**2).mean() + jnp.sum(jnp.tanh(x[0] @ p["w"].reshape(9, 3).T))


@construct(IMAGES, w=(3, 3, 1, 3))
def a_kernel_that_a_scan_shares(p, x):
    def step(x, _):
        return jnp.tanh(same(x, p["w"], feature_group_count=3)), None

    return (lax.scan(step, x[None], length=3)[0] ** 2).mean()


# Tables that are looked up.


@construct(tokens(), embed=(13, 8), mix=(8, 8))
def a_tied_embedding(p, ids):
    x = jnp.tanh(p["embed"][ids] @ p["mix"])
    return next_token_loss(x @ p["embed"].T, ids)


@construct(np.full_like(tokens(), 3), embed=(13, 8), mix=(8, 8))
def a_tied_embedding_of_one_token(p, ids):
    return a_tied_embedding(p, ids)


@construct(tokens(), embed=(13, 8), mix=(8, 8))
def a_tied_embedding_read_at_the_last_position(p, ids):
    """Its uses have two numbers of positions, so that their inner products have different shapes."""
    x = jnp.tanh(p["embed"][ids] @ p["mix"])
    return jnp.sum(jax.nn.logsumexp(x[-1:] @ p["embed"].T, axis=-1))


@construct(IDS, w=(IN, OUT))
def a_mapped_look_up(p, ids):
    """As Equinox's embedding has it, under a name."""
    x = jax.vmap(lambda i: checkpoint_name(p["w"], "w")[i])(ids)
    return jnp.sum(jnp.tanh(x[:-1] * x[1:]) @ p["w"][ids[0]])


@construct(np.array([[0, 2, 2, 8, 1], [8, 8, 0, 1, 3], [2, 4, 6, 0, 7]]), w=(6, OUT))
def rows_of_a_table_that_are_no_parameters(p, ids):
    """Such as a row of zeros for padding, or a frozen part of the vocabulary, before and after the table."""
    rows = jnp.concatenate([normal(2, OUT), p["w"], np.zeros((1, OUT), "f4")])[ids]
    return ending(rows)


@construct(np.array([[1, 9, 2], [1, 1, 1], [6, 7, 8]]), w=(7, OUT))
def look_ups_that_are_dropped_beside_a_penalty(p, ids):
    rows = p["w"].at[ids].get(mode="fill", fill_value=0)
    return jnp.sum(jnp.sin(rows + 1)) + 0.1 * ids[0] * jnp.sum(p["w"] ** 2)


@construct(
    np.array([[399, 1000], [3, 3], [5, 600]]),
    np.array([[[100.0, 0], [-99.99, 0]], [[1.0, 2], [3, 4]], [[1.0, 1], [1, 1]]], "f4"),
    w=(400, 2),
)
def a_plain_look_up_beyond_the_table(p, ids, c):
    """`table[ids]` promises to stay in bounds; where it does not, the derivative drops the row."""
    return jnp.sum(p["w"][ids] * c)


@construct(w=(IN,))
def a_look_up_in_zeros_that_fills_in_a_number(p, x):
    """What is found out of bounds is not zero."""
    found = jnp.zeros(IN).at[jnp.arange(IN) + 3].get(mode="fill", fill_value=1.0)
    return jnp.sum(jnp.sin(p["w"] * found * x[0]))


OUTSIDE = np.array([[0, 6, 7, 9], [-1, -7, -8, 3], [2, 2, 2, 2], [100, -100, 0, 0]])


def outside(mode):
    def loss(p, ids):
        x = jnp.take(p["w"], ids, axis=1, mode=mode)
        x = jnp.where((ids >= -7) & (ids < 7), x, 0.0) if mode == "fill" else x
        return jnp.sum(jnp.sin(x) * jnp.arange(4.0)[:, None])

    return loss, {"w": normal(4, 7)}, (OUTSIDE,)


CONSTRUCTS |= {f"indices out of range: {mode}": outside(mode) for mode in ("clip", "fill", "wrap")}


@construct(np.arange(200) % np.array([[7], [9], [200], [8]]), w=(2, 4))
def a_few_rows_that_are_added_to_a_frozen_table(p, ids):
    """What most positions look up is no row of the weight, and adds nothing to its norm."""
    table = jnp.concatenate([normal(6, 4), p["w"], normal(192, 4)])
    return jnp.sum(jnp.sin(table[ids]) * jnp.cos(ids)[:, None])


def of_each_table(p, ids):
    return jax.vmap(lambda table, i: table[i])(p, ids)


def of_tables_in_the_middle(p, ids):
    return jax.vmap(lambda table, i: table[i], (1, 1), 1)(p.swapaxes(0, 1), ids.T)


def scanned(p, ids):
    return lax.scan(lambda carry, x: (carry, x[0][x[1]]), 0, (p, ids))[1]


def tied(p, ids):
    return jnp.einsum("ktc,kvc->kvt", of_each_table(p, ids), p)


def by_two_indices(p, ids):
    return p[jnp.arange(3)[:, None], ids]


def by_two_indices_in_turn(p, ids):
    return p.transpose(2, 1, 0)[:, ids, jnp.arange(3)[:, None]]


def by_two_indices_the_last_axis_first(p, ids):
    numbers = lax.GatherDimensionNumbers((1,), (0, 1), (1, 0))
    both = jnp.stack([ids.ravel(), jnp.repeat(jnp.arange(3), 5)], -1)
    return lax.gather(p, both, numbers, (1, 1, 3), mode="fill", fill_value=0.0)


def by_two_indices_of_parts_that_overlap(p, ids):
    return by_two_indices(p[:, 2:], ids) + by_two_indices(p[:, 1:], ids)


def by_two_indices_of_which_one_is_no_table(p, ids):
    return p[jnp.where(ids[:, :1] < 10, jnp.arange(3)[:, None], 3), ids]


def with_an_index_of_an_axis_that_is_taken_whole(p, ids):
    """Only zero lies inside."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0, 1))
    both = jnp.stack([ids.ravel(), ids.ravel() // 10], -1)
    return lax.gather(p.reshape(60, 3), both, numbers, (1, 3), mode="fill", fill_value=0.0)


def of_all_rows(p, ids):
    return p.reshape(60, 3)[jnp.where(ids < 20, ids + jnp.array([[0], [20], [40]]), 60)]


def of_tables_that_take_turns(p, ids):
    """A row's number is then no number of the parameter's own order."""
    return p.transpose(1, 0, 2).reshape(60, 3)[ids]


def a_number_at_a_place(p, ids):
    return p.reshape(60, 3)[ids, jnp.arange(5) % 3]


def of_each_column(p, ids):
    return jnp.take_along_axis(p.reshape(60, 3), ids.T, axis=0)


def of_rows_that_each_have_a_matrix(p, ids):
    matrices = jnp.sin(jnp.arange(90.0)).reshape(30, 1, 3)
    table = jnp.einsum("vn,vdn->vd", p.reshape(60, 3)[::2], matrices)
    return jax.checkpoint(lambda table, ids: table[ids])(table, ids)


def in_tables(look_up):
    """Repeated look-ups of `jax.vmap`, of a scan and of two indices, and one beyond the last row."""
    ids = np.random.default_rng(1).integers(0, 20, (4, 3, 5))
    ids[:, :, 1] = ids[:, :, 0]
    ids[1, 2, 3] = 20

    def loss(p, ids):
        found = jnp.nan_to_num(look_up(p["w"], ids))
        return jnp.sum(jnp.tanh(found) * (1 + jnp.arange(found.size).reshape(found.shape)))

    return loss, {"w": 2 * normal(3, 20, 3)}, (ids,)


CONSTRUCTS |= {
    f"tables: {each.__name__}": in_tables(each)
    for each in (
        of_each_table, of_tables_in_the_middle, scanned, tied, by_two_indices, by_two_indices_in_turn,
        by_two_indices_of_which_one_is_no_table, with_an_index_of_an_axis_that_is_taken_whole, of_all_rows,
        of_tables_that_take_turns, a_number_at_a_place, of_each_column, by_two_indices_the_last_axis_first,
        by_two_indices_of_parts_that_overlap, of_rows_that_each_have_a_matrix,
    )
}  # fmt: skip

# Unusual numbers.


@construct(normal(BATCH, IN), w=(IN,), b=())
def a_gradient_that_is_a_number(p, x):
    """It depends on nothing."""
    return jnp.sin(x @ p["w"]) - p["b"]


def scaled(p, x):
    """A scale for each column, and a penalty, whose gradient is a multiple of the weights."""
    return x[0] @ (p["w"] * p["g"]) @ jnp.cos(jnp.arange(OUT)) + x[0, 0] * jnp.sum(p["w"] ** 2)


def unusual(one_weight=None, one_scale=None, weights=1.0, scales=1.0, inputs=1.0):
    w, g = normal(IN, OUT), 1 + normal(OUT)
    w[2, 2] = w[2, 2] if one_weight is None else one_weight
    g[2] = g[2] if one_scale is None else one_scale
    return scaled, {"w": w * np.float32(weights), "g": g * np.float32(scales)}, (X * inputs,)


UNUSUAL = {
    "a weight of zero": unusual(one_weight=0),
    "a scale of zero": unusual(one_scale=0),
    "a tiny scale": unusual(one_scale=1e-12),
    "a huge scale": unusual(one_scale=1e12),
    "a tiny weight": unusual(one_weight=1e-35),
    "tiny weights, huge inputs": unusual(weights=1e-10, inputs=np.float32(1e10)),
    "tiny weights, huge scales": unusual(weights=1e-10, scales=1e10),
    "huge weights, tiny scales": unusual(weights=1e12, scales=1e-12),
}
CONSTRUCTS |= UNUSUAL


@pytest.mark.quick_cases(
    "divided_by_a_weight-two_pass", "two_functions-one_pass", "of_several_results-auto",
    "penalties_before_and_behind_blocks-two_pass", "what_is_called_twice-one_pass",
    "a_cell_whose_states_come_out-one_pass", "without_entries-one_pass", "merged_and_turned-two_pass",
    "merged_between_a_weight_and_its_heads-one_pass", "a_kernel_that_is_used_twice_and_multiplied-two_pass",
    "a_tied_embedding_of_one_token-two_pass", "look_ups_that_are_dropped_beside_a_penalty-one_pass",
    "a_plain_look_up_beyond_the_table-one_pass", "indices out of range: clip-one_pass",
    "tables: of_all_rows-one_pass", "a weight of zero-one_pass", "a tiny weight-one_pass",
    "updated_in_every_step-one_pass", "updated_after_every_step-one_pass", "mixed_into_blocks-one_pass",
    "a_look_up_in_zeros_that_fills_in_a_number-one_pass",
    "a_few_rows_that_are_added_to_a_frozen_table-one_pass",
    "tables: by_two_indices_the_last_axis_first-one_pass",
    "tables: by_two_indices_of_parts_that_overlap-one_pass",
    "tables: of_rows_that_each_have_a_matrix-one_pass",
)  # fmt: skip
@pytest.mark.parametrize("how", ["one_pass", "two_pass", "auto"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_norms_and_sums_are_exact(name, how):
    is_exact(*CONSTRUCTS[name], how)


# The names of the parameters that are held for want of a rule.
WITHOUT_RULE = {
    **dict.fromkeys(
        (
            "divided_by_a_weight", "residual_with_penalty", "two_functions", "of_several_results",
            "a_cell_whose_states_come_out", "several_results_of_which_some_leave_a_loop",
            "a_convolution_with_a_mask", "a_kernel_that_is_used_twice_and_multiplied",
            "look_ups_that_are_dropped_beside_a_penalty", "tables: by_two_indices_in_turn",
            "tables: of_tables_that_take_turns", "tables: by_two_indices_of_parts_that_overlap",
            "a_look_up_in_zeros_that_fills_in_a_number",
        ),
        "w",
    ),
    **dict.fromkeys(UNUSUAL, "w g"),
    **dict.fromkeys(("scales_of_groups_used_twice", "scaled_basis"), "w s"),
    **dict.fromkeys(("complex_weights", "complex_weights_that_are_looked_up"), "re im"),
    "penalties_before_and_behind_blocks": "w v",
    "a_weight_that_only_a_penalty_uses": "unused",
    "a_scaled_weight_behind_a_block": "scale",
    "scaled_by_what_a_loop_shares": "scale",
    "functions_of_slices_and_of_what_a_loop_shares": "w v u",
    "a_carry_that_starts_as_a_weight": "start",
    **dict.fromkeys(("updated_in_every_step", "updated_after_every_step"), "start w"),
    "a_gradient_that_is_a_number": "b",
    "gradients_of_different_lengths": " ".join(LENGTHS),
}  # fmt: skip


@pytest.mark.quick_cases(
    "tables: of_all_rows", "a_kernel_that_a_scan_shares", "merged_of_experts", "mixed_into_blocks",
    "tables: by_two_indices_the_last_axis_first", "tables: by_two_indices_of_parts_that_overlap",
)  # fmt: skip
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_rules_of_parameters_are_explained(name):
    assert without_rule(*CONSTRUCTS[name]) == set(WITHOUT_RULE.get(name, "").split())


@pytest.mark.quick_cases
@pytest.mark.parametrize("name", [name for name in CONSTRUCTS if name.startswith("merged")])
def test_no_example_has_a_gradient_of_the_size_of_what_adapters_are_merged_with(name):
    loss, p, batch = CONSTRUCTS[name]
    traced = jax.make_jaxpr(clipping.clipped_grad(loss, l2_clip_norm=0.5))(p, *batch)
    sizes = [v.aval.size for eqn in equations(traced) for v in eqn.outvars]
    assert max(sizes) < len(WIDE) * WEIGHT.size


def taken(mode):
    return lambda p, ids: jnp.take(p, ids, axis=0, mode=mode)


def gathered(p, ids):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(p, ids[:, None], numbers, (1, p.shape[1]), mode="clip")


def sliced(p, ids):
    zero = jnp.zeros((), ids.dtype)
    return jnp.concatenate([lax.dynamic_slice(p, (i, zero), (2, p.shape[1])) for i in ids])


@pytest.mark.quick_cases("gather-256-int8")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32"])
@pytest.mark.parametrize("rows", [256, 300])
@pytest.mark.parametrize("look_up", [taken("fill"), taken("clip"), gathered, sliced],
                         ids=["fill", "clip", "gather", "slice"])  # fmt: skip
def test_look_ups_by_every_type_of_index_are_exact(monkeypatch, look_up, rows, dtype):
    """Bytes index 256 rows."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    most = min(rows - 1, np.iinfo(dtype).max)
    ids = np.array([[0, most, 7], [most - 2, 100, 100], [most, most, 0]]).astype(dtype)
    table = normal(rows, 3)

    def loss(p, ids):
        found = look_up(p, ids)
        signs = jnp.where(jnp.arange(len(found)) % 2 == 0, 1.0, -1.01)[:, None]
        return jnp.sum(signs * jnp.tanh(found))

    for method in ("one_pass", "two_pass"):
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method)
        # XLA's older kernels scatter by bytes to rows that do not exist.
        out = jax.jit(fn, compiler_options=USUAL_KERNELS)(table, ids)
        check(out, per_example(loss, table, (ids.astype(np.int32),)), 0.1)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_the_first_byte_and_the_last_do_not_cancel(method):
    """Rows 0 and 255, with gradients that would cancel if they were one row."""

    def loss(p, ids):
        return jnp.sum(jnp.take(p, ids[0], axis=0) - 1.01 * jnp.take(p, ids[1], axis=0))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method)
    out = jax.jit(fn)(jnp.zeros((256, 3)), np.array([[0, 255]], np.uint8))
    np.testing.assert_allclose(out.norms, np.sqrt(3 * (1 + 1.01**2)), rtol=1e-4)
    assert np.flatnonzero(np.asarray(out.grads)[:, 0]).tolist() == [0, 255]


@pytest.mark.quick_cases("int32")
@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "int64"])
def test_consecutive_rows_that_begin_too_late_or_too_early_are_the_last_or_the_first(dtype):
    """A start beyond the table is moved back, whatever it would be in another type."""
    # From the end, as JAX counts; and too early.
    early = [-1, -9] if dtype.startswith("i") else [5, 7]
    far = 2**32 + 2 if dtype == "int64" else np.iinfo(dtype).max
    starts, rows = np.array([1, far, *early], dtype), np.array([1, 5, 5, 0 if early[1] < 0 else 5])
    x = normal(4, 3, 2)

    def loss(p, x, start):
        found = lax.dynamic_slice(p, (start, jnp.zeros((), dtype)), (3, 2))
        return jnp.sum(found * x) + 0.5 * jnp.sum(p[:3] * x)

    def expected(p, x, row):
        return jnp.sum(p[row + jnp.arange(3)] * x) + 0.5 * jnp.sum(p[:3] * x)

    table = jnp.ones((8, 2))
    gradients = per_example(expected, table, (x, rows))
    with jax.enable_x64(dtype == "int64"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "FAVOR_GRADIENT", 0.0)
        fn = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass"))
        check(fn(table, x, starts), gradients, 0.5)


LAYOUTS = {
    1: ("NWC", "WIO", "NWC"),
    2: ("NHWC", "HWIO", "NCHW"),
    3: ("NCDHW", "DHWIO", "NDHWC"),
}
# By direction: strides, padding, dilation of the input and of the kernel.
SETTINGS = {
    "SAME": ((1, 1, 1), "SAME", (1, 1, 1), (1, 1, 1)),
    "dilated kernel": ((2, 2, 2), "VALID", (1, 1, 1), (2, 2, 2)),
    "patches that do not overlap": ((4, 4, 4), "VALID", (1, 1, 1), (1, 1, 1)),
    "dilated input": ((1, 1, 1), ((1, 2),) * 3, (2, 2, 2), (1, 1, 1)),
    "negative padding": ((2, 2, 2), ((2, -1),) * 3, (1, 1, 1), (1, 1, 1)),
    "one for each direction": ((1, 2, 3), ((1, 2), (0, 3), (1, 1)), (1, 2, 1), (1, 2, 1)),
    "other directions": ((3, 1, 2), ((1, 2), (0, 3), (1, 1)), (1, 2, 2), (2, 1, 1)),
}


@pytest.mark.quick_cases("other directions-2-2-one_pass", "dilated input-2-1-held")
@pytest.mark.parametrize("how", ["one_pass", "held"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4, "batch"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_of_kernels_are_exact(setting, groups, ndim, how):
    """Of examples of two images each."""
    numbers = LAYOUTS[ndim]
    # Thousands of positions, whose terms cancel, would be rounded up by more (`gram.FLOOR`).
    lengths = [4, 3, 5] if setting == "dilated input" else [7, 6, 8]
    size = dict(zip("DHW"[-ndim:], lengths, strict=False)) | {"N": 2, "C": 4}
    features = {"batch_group_count": 2} if groups == "batch" else {"feature_group_count": groups}
    strides, padding, *dilations = (
        each if isinstance(each, str) else each[:ndim] for each in SETTINGS[setting]
    )

    def loss(p, x):
        return ending(
            lax.conv_general_dilated(x, p, strides, padding, *dilations, numbers, **features)
        )

    kernel = normal(*[3, 2, 4][:ndim], 4 if groups == "batch" else 4 // groups, 8)
    images = normal(3, *(size[axis] for axis in numbers[0]))
    is_exact(loss, kernel, (images,), how, slack=1e-2 if ndim == 3 else 1e-3)


def equation_of(convolve, *operands):
    equations = jax.make_jaxpr(convolve)(*operands).jaxpr.eqns
    (found,) = [e for e in equations if e.primitive.name == "conv_general_dilated"]
    return found


@pytest.mark.parametrize(
    ("strides", "dilations", "groups"),
    [((1, 2), (1, 2), {}), ((3, 1), (2, 1), {"batch_group_count": 2}), ((2, 1), (1, 3), {})],
)
def test_each_direction_has_a_stride_and_a_dilation_of_its_own(strides, dilations, groups):
    x, kernel = 2 * normal(4, 9, 12, 3), 2 * normal(2, 3, 3, 8)

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, strides, ((1, 2), (0, 3)), (1, 2), dilations, ("NHWC", "HWIO", "NHWC"), **groups
        )  # fmt: skip

    found, expected = Convolution(equation_of(convolve, x, kernel)), convolve(x, kernel)
    np.testing.assert_allclose(found.evaluate(x, kernel), expected, atol=1e-4)
    number = {label: i for i, label in enumerate(found.sizes)}
    left, right = ([number[a] for a in axes] for axes in (found.left, found.right))
    made = [number[a] for axis in found.axes for a in axis]
    product = np.einsum(found.patches(x), left, found.grouped(kernel), right, made)
    np.testing.assert_allclose(product.reshape(expected.shape), expected, atol=1e-4)
