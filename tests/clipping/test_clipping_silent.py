"""Losses that would void the guarantee without a word: each is refused or reported, and no other is."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clipping_exact import normal
from flax import linen as nn
from flax import nnx
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

import dpx
from dpx.clipping import ClippingWarning, record_keys, reports

X = 2 * normal(4, 3)
BATCH = jnp.asarray(X)
W = {"w": jnp.ones(3)}
KEYS = jax.random.split(jax.random.key(0), 4)
OTHERS = "over the axis 'rows', which reads what other examples"
IN_BATCH = "that is also in the batch"
AS_MANY = "as many rows as there are examples"
ALIKE = "the same for all examples and steps"
AVERAGE = r"BatchNorm in training mode.*use GroupNorm"


class Call(NamedTuple):
    """A call that is refused or reported with some words, or taken.

    Attributes:
      mapped: whether it is one of several, over examples of which an axis "rows" has the name.
    """

    loss: Callable
    says: str = ""
    batch: tuple = (X,)
    params: Any = W
    options: Any = None
    mapped: bool = False

    def __call__(self, **options):
        options = {"l2_clip_norm": 1.0} | (self.options or {}) | options
        gradient = dpx.clipped_grad(self.loss, **options)
        if self.mapped:
            step = jax.vmap(lambda x: gradient(self.params, x).norms, axis_name="rows")
            return step(np.stack([X, X]))
        return gradient(self.params, *self.batch).norms


def plain(params, x):
    return jnp.square(x @ params["w"])


REFUSED, REPORTED, TAKEN = {}, {}, {"plain": lambda: Call(plain)}


def refused(name, *arguments, **more):
    REFUSED[name] = functools.partial(Call, *arguments, **more)


def reported(name, *arguments, **more):
    REPORTED[name] = functools.partial(Call, *arguments, **more)


def taken(name, loss, **more):
    TAKEN[name] = functools.partial(Call, loss, **more)


# Collectives.

COLLECTIVES = {
    "pmean": lambda x: jax.lax.pmean(x, "rows"),
    "all_gather": lambda x: jax.lax.all_gather(x, "rows").sum(0),
    "ppermute": lambda x: jax.lax.ppermute(x, "rows", [(0, 1)]),
    "axis_index": lambda x: x * jax.lax.axis_index("rows"),
    "in remat": lambda x: jax.checkpoint(lambda y: jax.lax.psum(y, "rows"))(x),
    "in scan": lambda x: jax.lax.scan(lambda c, y: (c + jax.lax.psum(y, "rows"), y), 0.0, x)[0] * x,
    "in a condition": lambda x: (
        x
        * jax.lax.while_loop(
            lambda n: jax.lax.psum(n, "rows") < 9, lambda n: n + 1, jax.lax.stop_gradient(x[0])
        )
    ),
}


def on_mesh(axis):
    mesh = jax.make_mesh((1,), ("own",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": P("own"), "out_specs": P("own"), "check_vma": False}
    body = functools.partial(jax.lax.psum, axis_name=axis)
    return lambda p, x: plain(p, jax.shard_map(body, mesh=mesh, **specs)(x))


def less_its_own_mean(x):
    return jax.vmap(lambda y: y - jax.lax.pmean(y, "own"), axis_name="own")(x)


for name, collective in COLLECTIVES.items():
    refused(f"collective: {name}", lambda p, x, f=collective: plain(p, f(x)), OTHERS, mapped=True)
refused("collective: in shard_map", on_mesh("rows"), OTHERS, mapped=True)
taken("a collective of the loss itself", lambda p, x: plain(p, less_its_own_mean(x)))
taken("a collective over devices of the loss itself", on_mesh("own"))

AXES = {
    "pmean": lambda x: jax.lax.pmean(x, "batch"),
    "all_gather": lambda x: jax.lax.all_gather(x, "batch").sum(0),
    "axis_index": lambda x: x * jax.lax.axis_index("batch"),
    "in jit": lambda x: jax.jit(functools.partial(jax.lax.pmean, axis_name="batch"))(x),
    "BatchNorm": lambda x: nnx.BatchNorm(3, axis_name="batch", rngs=nnx.Rngs(0))(x[None])[0],
}
for name, use in AXES.items():
    says = r"asks for the axis 'batch'.*use GroupNorm"
    refused(f"axis that nobody binds: {name}", lambda p, x, f=use: plain(p, f(x)), says)


# What a loss closes over.

WITHIN = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "both": lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
}


def centered(x, called=lambda f: f):
    """A loss of rows less the mean of an array."""
    less = called(lambda row: row - jnp.mean(x, 0))
    return lambda params, row: plain(params, less(row))


for name, x in (("NumPy", X), ("JAX", BATCH)):
    for size in (None, 2):
        options = {"microbatch_size": size}
        refused(f"batch, {name}, {size}", centered(x), IN_BATCH, batch=(x,), options=options)
    for within, called in WITHIN.items():
        refused(f"batch, {name}, in {within}", centered(x, called), IN_BATCH, batch=(x,))
        reported(f"as many rows, {name}, in {within}", centered(x, called), AS_MANY, batch=(X + 1,))
LONG = 2 * normal(12, 3)
LONG[3, 1] = np.nan  # as a missing value is
FORMS = {
    "transposed": LONG.T,
    "one more axis": LONG[None],
    "flat": LONG.reshape(-1),
    "itself": 1 * LONG,
}
for name, other in FORMS.items():  # Before JAX sees it.
    refused(
        f"batch, {name}", lambda p, x, y=other: plain(p, x - jnp.sum(y)), IN_BATCH, batch=(LONG,)
    )
for name, few in (("zeros", np.zeros((3, 4))), ("numbers", np.arange(36.0).reshape(6, 6)),
                  ("a part", LONG[:, :2].T)):  # fmt: skip
    taken(f"closes over {name}", lambda p, x, y=few: plain(p, x - jnp.sum(y)), batch=(LONG,))
for name, given in (("indices", np.arange(4)), ("ones", np.ones((4, 3), np.float32))):
    loss = lambda p, x, y, z=given: plain(p, x) * jnp.asarray(z).mean()  # noqa: E731
    reported(f"equal by chance: {name}", loss, AS_MANY, batch=(X, given))
reported("as many rows", centered(jnp.asarray(X + 1)), AS_MANY)
taken("of other lengths it is a constant", centered(jnp.asarray(X + 1)), batch=(X[:3],))
taken("of one example it is one", centered(jnp.asarray(X + 1)), batch=(X[:1],))


def scaled_by_state():
    class Scaled(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.scale = nnx.Variable(jnp.ones(4))

    def loss(model, x):
        return (model.linear(x) * model.scale.get_value().sum()).sum()

    return Call(loss, params=Scaled())


TAKEN["what is not trained"] = scaled_by_state


def leaving(wrap):
    ref = jax.new_ref(jnp.zeros(3))

    def left(x):
        ref[...] = ref[...] + x
        return ref[...]

    return Call(lambda p, x: plain(p, x * wrap(left)(x)), "closes over a jax.Ref",
                options={"microbatch_size": 1})  # fmt: skip


def batch_in_a_ref():
    ref = jax.new_ref(BATCH)
    return Call(lambda p, x: plain(p, x) * ref[...].mean(), "closes over a jax.Ref")


REFUSED |= {
    "what one example leaves for the next": lambda: leaving(lambda f: f),
    "what one example leaves for the next, in jit": lambda: leaving(jax.jit),
    "a batch in a mutable array": batch_in_a_ref,
}


# Moving averages of examples.


def nnx_outside(training):
    module = nnx.BatchNorm(3, use_running_average=not training, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, x):
        return nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))(x).sum()

    return loss, params


def nnx_module(training):
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    return lambda module, x: module(x, use_running_average=not training).sum(), module


def linen(training, wrap=lambda f: f, trained=False):
    """`trained` is whether all variables are given as parameters."""
    module = nn.BatchNorm(use_running_average=not training)
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))

    def loss(params, x):
        given = params if trained else {**variables, "params": params}
        return wrap(lambda x: module.apply(given, x, mutable=["batch_stats"]))(x)[0].sum()

    return loss, variables if trained else variables["params"]


def linen_scanned(training):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.BatchNorm(use_running_average=not training)(nn.Dense(3)(x)), None

    axes: Any = {"params": 0, "batch_stats": 0}
    stack = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)()
    variables = stack.init(jax.random.key(0), X[0], None)

    def loss(params, x):
        given = {**variables, "params": params}
        return stack.apply(given, x, None, mutable=["batch_stats"])[0][0].sum()

    return loss, variables["params"]


def haiku(training):
    def module(training):
        return hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, training))

    params, state = module(True).init(jax.random.key(0), jnp.ones((1, 3)))
    return lambda params, x: module(training).apply(params, state, None, x[None])[0].sum(), params


def equinox_batch_norm():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="rows", mode="batch")
    says = "statistics mix examples"
    return Call(lambda norm, x: norm(x, state)[0].sum(), says, params=norm, mapped=True)


def handed_out():
    """The statistics are what the loss returns beside the loss."""
    module = nn.BatchNorm(use_running_average=False)
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))

    def loss(params, x):
        out, state = module.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return out.sum(), state

    return Call(loss, AVERAGE, params=variables["params"], options={"has_aux": True})


AVERAGES = {
    "nnx outside": nnx_outside,
    "nnx module": nnx_module,
    "linen": linen,
    "linen in jit": functools.partial(linen, wrap=jax.jit),
    "linen in remat": functools.partial(linen, wrap=jax.checkpoint),
    "linen, scanned": linen_scanned,
    "haiku": haiku,
}


def averaging(make, training=True):
    loss, params = make(training)
    return Call(loss, AVERAGE, params=params)


for name, make in AVERAGES.items():
    REFUSED[f"average: {name}"] = functools.partial(averaging, make)
    TAKEN[f"frozen average: {name}"] = functools.partial(averaging, make, False)
REFUSED["average: trained"] = lambda: averaging(functools.partial(linen, trained=True))
REFUSED["average: handed out"] = handed_out
REFUSED["average: equinox"] = equinox_batch_norm


def no_average(w, x):
    mean, std, prior = (jnp.asarray(row) for row in X[:3])
    out = w * x
    mixed = 0.5 * prior + 0.5 * w  # of parameters
    adjusted = [scaled + 0.5 * prior for scaled in (out, 0.1 * out, out.max() * out)]
    aux = out * std + mean, mixed, prior + out, adjusted
    return jnp.square(0.9 * out + 0.1 * prior).sum(), aux


taken("no average of examples", no_average, params=jnp.ones(3), options={"has_aux": True})


def mixed_again(w, x):
    """The derivative of a mixture with a constant, by hand, which makes the mixture once more."""
    mixture = jax.custom_vjp(lambda w, x: 0.9 * jnp.asarray(X[0]) + 0.1 * jnp.sin(w * x))
    mixture.defvjp(
        lambda *given: (mixture(*given), given), lambda r, g: jax.vjp(mixture.fun, *r)[1](g)
    )
    return jnp.square(mixture(w, x)).sum()


taken("a mixture that is made again", mixed_again, params=jnp.ones(3))


# Derivatives and batching rules that somebody wrote.


def in_backward(change):
    """The identity, whose cotangents are changed on the way back."""
    identity = jax.custom_vjp(lambda x: x * 1.0)
    identity.defvjp(lambda x: (x * 1.0, None), lambda _, cotangent: (change(cotangent),))
    return identity


def in_forward(change):
    """The identity, of which the result is another where it is differentiated."""
    identity = jax.custom_vjp(lambda x: x * 1.0)
    identity.defvjp(lambda x: (change(x), None), lambda _, cotangent: (cotangent,))
    return identity


def in_tangent(change):
    identity = jax.custom_jvp(lambda x: x * 1.0)
    identity.defjvp(lambda given, tangents: (given[0] * 1.0, change(tangents[0])))
    return identity


def in_transpose(change):
    return lambda x: jax.custom_derivatives.linear_call(
        lambda _, x: x * 1.0, lambda _, cotangent: change(cotangent), None, x
    )


def in_one_operand(change):
    """Refuses the derivative by its second operand, which nobody takes."""

    @jax.custom_vjp
    def first(x, y):
        return x * y

    def forward(x, y):
        if y.perturbed:
            raise TypeError("no derivative by y")
        return x.value * y.value, y.value

    def backward(y, cotangent):
        return change(cotangent) * y, jnp.zeros_like(y)

    first.defvjp(forward, backward, symbolic_zeros=True)
    return lambda x: first(x, 1.0)


def loss_of(function, wrap=lambda function: function):
    return lambda params, x: jnp.square(wrap(function)(x @ params["w"]))


def summed_up(x):
    return jax.lax.psum(x, "rows")


def in_the_first_of_many_blocks(function):
    def blocks(x):
        for each in (function, *[in_backward(jnp.negative)] * 19):
            x = jax.checkpoint(lambda x, each=each: each(jnp.sin(x)))(x)
        return x

    return blocks


PLACES = {
    "backward": in_backward,
    "forward": in_forward,
    "tangent": in_tangent,
    "transpose": in_transpose,
}
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "scan from a constant": lambda f: (
        lambda x: jax.lax.scan(lambda c, _: (f(c) + x, None), 0.0, length=2)[0]
    ),
    "branch": lambda f: lambda x: jax.lax.cond(x > 0, f, jnp.sin, x),
}
refused(
    "collective in backward, in the first of many blocks",
    loss_of(in_backward(summed_up), in_the_first_of_many_blocks),
    OTHERS,
    mapped=True,
)
for name, place in PLACES.items():
    for within, wrap in WRAPS.items():
        refused(
            f"collective in {name}, {within}", loss_of(place(summed_up), wrap), OTHERS, mapped=True
        )
    closing = loss_of(place(lambda x: x * jnp.mean(BATCH)))
    refused(f"batch in {name}", closing, IN_BATCH, batch=(BATCH,))
    reported(f"as many rows in {name}", closing, AS_MANY, batch=(X + 1,))
    # JAX cannot vectorise a `linear_call`.
    taken(f"a constant in {name}", closing, batch=(X[:3],), options={"microbatch_size": 1})
    drawing = loss_of(place(lambda x: x * jax.random.normal(jax.random.key(0))))
    reported(f"drawn in {name}", drawing, ALIKE)
refused("collective in one operand", loss_of(in_one_operand(summed_up)), OTHERS, mapped=True)
# Derivatives within derivatives are not taken.
taken("deeper", loss_of(in_backward(in_backward(summed_up))), mapped=True)


def less_the_mean():
    """What subtracts the mean of all examples where it is vectorised."""
    function = jax.custom_batching.custom_vmap(lambda x: x * 1.0)
    function.def_vmap(lambda size, batched, x: (x - x.mean(0), True))
    return function


def doubled_by_jax(params, x):
    return plain(params, jax.custom_batching.sequential_vmap(lambda x: 2 * x)(x))


def over_the_largest(params, x):
    return plain(params, divided_p.bind(x))


# Somebody wrote how it is vectorised; here one example divides all by its own largest entry.
divided_p = core.Primitive("over_the_largest")
divided_p.def_impl(lambda x: x / np.max(np.abs(x)))
divided_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(
    divided_p, mlir.lower_fun(lambda x: x / jnp.max(jnp.abs(x)), multiple_results=False)
)
batching.primitive_batchers[divided_p] = lambda xs, axes: (divided_p.bind(xs[0]), axes[0])


def on_the_host(params, x, method):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plain(
        params, jax.pure_callback(lambda x: 2 * np.asarray(x), like, x, vmap_method=method)
    )


RULE = "with a batching rule of its own"
reported("batching rule", lambda p, x: plain(p, less_the_mean()(x)), RULE)
reported("batching rule in backward", loss_of(in_backward(less_the_mean())), RULE)
reported("batching rule in forward", loss_of(in_forward(less_the_mean())), RULE)
reported("own primitive", over_the_largest, "over_the_largest, a primitive that is not JAX's own")
for method in ("expand_dims", "broadcast_all"):
    loss = functools.partial(on_the_host, method=method)
    reported(f"host, {method}", loss, f"the host .pure_callback.*'{method}'")
taken("host, sequential", functools.partial(on_the_host, method="sequential"))
taken("what JAX itself calls in turn", doubled_by_jax)


# Random numbers.


def drawn_in_a_scan(key, x):
    def body(key, row):
        key, drawn = jax.random.split(key)
        return key, row * jax.random.normal(drawn)

    return jax.lax.scan(body, key, x)[1]


def drawn_in_a_loop(key, x):
    def body(state):
        return state[0] + 1, state[1] + jax.random.normal(jax.random.fold_in(key, state[0]))

    return jax.lax.while_loop(lambda state: state[0] < 3 + 0 * x[0], body, (0, x[1]))[1]


def replaced_in_a_loop(key, x, is_scan):
    """A loop that replaces the example's key by one that all share."""

    def step(i, state):
        key, total = state
        return jax.random.key(5), total + jax.random.normal(key)

    # JAX makes a scan of a loop over a number of iterations that it knows.
    return jax.lax.fori_loop(0, 3 if is_scan else jnp.where(x[0] > 0, 3, 2), step, (key, 0.0))[1]


def drawn_after_the_first_step(key, x):
    """A loop draws from a key of the example, but for its first step."""
    shared = jax.random.key(0, impl=jax.random.key_impl(key))
    return jax.lax.scan(lambda drawn, row: (key, row * jax.random.normal(drawn)), shared, x)[1]


def drawn_until(key, x):
    """A loop that the example ends draws from a key that is the same for all."""
    shared = jax.random.key(0, impl=jax.random.key_impl(key))
    draw = lambda c: (c[0] + 1, jax.random.split(c[1])[0], jax.random.normal(c[1], x.shape))  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] < x[0], draw, (-9.0, shared, x))[2]


def drawn_where(key, x):
    """So does a branch that it chooses."""
    shared = jax.random.key(0, impl=jax.random.key_impl(key))
    return jax.lax.cond(x[0] > 0, lambda: jax.random.normal(shared, x.shape), lambda: x)


def drawn_for_all_too(key, x):
    draw = jax.jit(lambda key: jax.random.normal(key, (3,)))
    return draw(key) * draw(jax.random.key(1))


DRAWS = {
    "masks": lambda key, x: jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, x.shape),
    "in a scan": drawn_in_a_scan,
    "in a branch": lambda key, x: jax.lax.cond(
        x[0] > 0, lambda: jax.random.normal(key, x.shape), lambda: 0 * x
    ),
    "in a loop": drawn_in_a_loop,
    "by rejection": lambda key, x: jax.random.gamma(key, 2.0, x.shape),
}


def drawing_loss(params, x, key, draw):
    return plain(params, x * jax.lax.stop_gradient(draw(key, x)))


for name, draw in DRAWS.items():
    loss = functools.partial(drawing_loss, draw=draw)
    taken(f"own key, {name}", loss, batch=(X, KEYS))
    reported(f"shared key, {name}", functools.partial(loss, key=jax.random.key(0)), ALIKE)
derived = jax.custom_vjp(lambda x, key: x * 1.0)
derived.defvjp(
    lambda x, key: (x, key), lambda key, cotangent: (cotangent * jax.random.normal(key), None)
)
loss = lambda p, x, key: jnp.square(derived(x @ p["w"], key))  # noqa: E731
taken("own key, in a derivative", loss, batch=(X, KEYS))
SHARED = {
    "for all too": drawn_for_all_too,
    "replaced in a scan": functools.partial(replaced_in_a_loop, is_scan=True),
    "replaced in a while loop": functools.partial(replaced_in_a_loop, is_scan=False),
}
for name, draw in SHARED.items():
    reported(f"own key, {name}", functools.partial(drawing_loss, draw=draw), ALIKE, batch=(X, KEYS))


def dropout(deterministic):
    layers = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    layers[1].deterministic = deterministic
    return Call(lambda model, x: model(x).sum(), ALIKE, params=nnx.Sequential(*layers))


REPORTED["masks that repeat"] = lambda: dropout(False)
TAKEN["no masks"] = lambda: dropout(True)
raw = X[:2], jax.random.PRNGKey(0)
reported("raw key", lambda p, x, key: plain(p, x), "looks like one raw PRNGKey", batch=raw)


METHODS = pytest.mark.parametrize("method", ["auto", "vmap"])


def trace(calls, name, method, **options):
    """Traces a call, where warnings are errors: nothing has to be computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClippingWarning)
        warnings.filterwarnings("ignore", "params holds batch_stats")
        jax.eval_shape(lambda: calls[name]()(method=method, **options))


@pytest.mark.quick_cases(
    "collective: pmean-auto", "collective: in a condition-auto", "collective: in shard_map-auto",
    "axis that nobody binds: in jit-auto", "batch, NumPy, 2-auto", "batch, JAX, in both-auto",
    "batch, transposed-auto", "a batch in a mutable array-auto", "average: linen-auto",
    "what one example leaves for the next, in jit-auto", "collective in backward, jit-auto",
    "collective in backward, in the first of many blocks-auto",
    "collective in tangent, branch-auto", "batch in transpose-auto", "collective in one operand-auto",
)  # fmt: skip
@METHODS
@pytest.mark.parametrize("name", REFUSED)
def test_what_voids_the_sensitivity_is_refused(name, method):
    with pytest.raises(ValueError, match=REFUSED[name]().says):
        trace(REFUSED, name, method)


@pytest.mark.quick_cases(
    "as many rows, NumPy, in jit-auto", "equal by chance: ones-auto", "as many rows in forward-auto",
    "drawn in backward-auto", "batching rule in backward-auto", "own primitive-auto",
    "host, expand_dims-auto", "shared key, by rejection-auto", "own key, replaced in a scan-auto",
    "own key, for all too-auto", "raw key-auto",
)  # fmt: skip
@METHODS
@pytest.mark.parametrize("name", REPORTED)
def test_what_may_void_the_sensitivity_is_reported(name, method):
    says = REPORTED[name]().says
    with pytest.raises(ClippingWarning, match=says):
        trace(REPORTED, name, method)
    with pytest.raises(ValueError, match=says):
        trace(REPORTED, name, method, strict=True)


@pytest.mark.quick_cases(
    "plain-auto", "a collective over devices of the loss itself-auto", "closes over numbers-auto",
    "what is not trained-auto", "no average of examples-auto", "own key, in a loop-auto", "deeper-auto",
    "a mixture that is made again-auto",
)  # fmt: skip
@METHODS
@pytest.mark.parametrize("name", TAKEN)
def test_what_does_not_is_taken_without_a_word(name, method):
    trace(TAKEN, name, method, strict=True)


@pytest.mark.quick_cases("auto")
@METHODS
def test_a_loss_that_closes_over_its_tracers_is_refused(method):
    step = jax.jit(lambda x: Call(centered(x), batch=(x,))(method=method))
    with pytest.raises(ValueError, match=IN_BATCH):
        step(BATCH)


@pytest.mark.parametrize("name", ["batching rule in backward", "own primitive"])
def test_what_is_given_all_examples_is_not_where_there_is_one_at_a_time(name):
    alone = REPORTED[name]()(strict=True, microbatch_size=1)
    one = REPORTED[name]()._replace(batch=(X[:1],))(strict=True)
    np.testing.assert_allclose(alone[0], one[0], rtol=1e-5)


def test_a_jaxpr_that_a_primitive_keeps_apart_from_its_constants_is_read():
    """As lineax's linear solves keep that of an operator, whose constants are operands among others."""
    largest = jax.make_jaxpr(lambda x, by: x / by)(X[0], X[0]).jaxpr
    (by,) = largest.invars[1:]
    apart = largest.replace(constvars=[by], invars=largest.invars[:1])
    primitive = core.Primitive("divide_apart")
    primitive.def_abstract_eval(lambda x, by, **_: x)
    primitive.def_impl(lambda x, by, **_: x / by)
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda x, by, **_: x / by, multiple_results=False)
    )
    batching.primitive_batchers[primitive] = lambda xs, axes, **params: (
        primitive.bind(*xs, **params),
        axes[0],
    )
    with pytest.warns(ClippingWarning, match="divide_apart, a primitive that is not JAX's own"):
        found = Call(lambda p, x: plain(p, primitive.bind(x, jnp.abs(x) + 1, held=(apart,))))()
    want = Call(lambda p, x: plain(p, x / (jnp.abs(x) + 1)))()
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.quick_cases("auto-rbg")
@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
@METHODS
def test_keys_that_jax_draws_from_by_place_are_refused(implementation, method):
    """A batch of them draws from the first: the record that has it would change the masks of all others."""
    keys = record_keys(jax.random.key(0, impl=implementation), 3, jnp.arange(4))
    drawn = drawn_after_the_first_step, drawn_until, drawn_where
    for draw in (DRAWS["by rejection"], *drawn, DRAWS["masks"]):
        loss = functools.partial(drawing_loss, draw=draw)
        with pytest.raises(ValueError, match="threefry2x32"):
            Call(loss, batch=(X, keys))(method=method)
    whole, rest = (
        Call(loss, batch=(X[i:], keys[i:]))(method=method, microbatch_size=1, strict=True)
        for i in (0, 1)
    )
    assert jnp.array_equal(whole[1:], rest)
    shared = functools.partial(loss, key=jax.random.key(0, impl=implementation))
    with pytest.raises(ValueError, match=ALIKE):
        Call(shared)(method=method, strict=True)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_fit_refuses_a_loss_that_closes_over_its_data(kind):
    x, labels = kind(np.concatenate([X, X + 1, X + 2])), jnp.arange(12.0)

    def fit(loss_fn):
        dpx.training.fit(
            loss_fn, W, x, epsilon=1.0, delta=1e-3, batch_size=3, steps=1, optimizer=optax.sgd(0.1),
            l2_clip_norm=1.0, key=jax.random.key(0), strict=True,
        )  # fmt: skip

    with pytest.raises(ValueError, match=rf"shape \(12, 3\) {IN_BATCH}, or holds the data"):
        fit(centered(x))
    with pytest.raises(ValueError, match=r"shape \(12,\), with as many rows"):
        fit(lambda params, row: plain(params, row) + labels.mean())


def test_records_that_batches_are_taken_from_are_no_constants_of_a_loss():
    records, labels = jnp.asarray(np.concatenate([X, X + 1, X + 2])), jnp.arange(12.0)
    with reports.records((records, labels[:, None] ** 2), len(records)):
        with pytest.raises(ValueError, match=f"{IN_BATCH}, or holds the data it is taken"):
            Call(centered(records))()
        with pytest.warns(ClippingWarning, match=r"shape \(12,\), with as many rows"):
            Call(lambda params, row: plain(params, row) + labels.mean())()


@pytest.mark.parametrize(
    ("loss", "shape", "primitive", "rule"),
    [
        (lambda p, x: (x[0] * jnp.cumsum(p["large"], axis=0)).sum() ** 2, (256, 256), "cumsum",
         "no rule for cumsum"),
        (
            lambda p, x: (
                jnp.square(jnp.einsum("i,ijk->jk", x, p["large"])).sum()
                + jnp.einsum("ij,ijk->k", jnp.outer(x, x), p["large"]).sum()
            ),
            (16, 16, 256),
            "dot_general",
            "uses split its axes differently",
        ),
    ],
    ids=["no rule", "uses that split axes differently"],
)  # fmt: skip
def test_a_fallback_of_a_large_parameter_is_an_error_in_a_strict_call(loss, shape, primitive, rule):
    large, x = {"large": jnp.ones(shape) / 256}, (np.ones((2, 16), np.float32),)
    call = Call(loss, batch=x, params=large)
    call()
    (row,) = dpx.explain_clipping(loss, large, *x).rows
    assert row.rule == f"gradient ({rule})"
    says = rf"params\[large\] of 65536 elements has no rule for {primitive}"
    with pytest.raises(ValueError, match=says):
        call(strict=True)
    call._replace(params={"large": large["large"][..., :-1]})(strict=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_named_outside_jit(bad):
    params = {"a": jnp.ones(3), "w": jnp.array([1.0, bad, 1.0])}
    call = Call(lambda p, x: plain(p, x * p["a"]), params=params)
    with pytest.raises(ValueError, match=r"params\[w\] holds NaN or infinity"):
        call()
    assert np.isinf(jax.jit(lambda params: call._replace(params=params)())(params)).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (True, r"batch\[1\]=True has no batch axis.*functools.partial"),
        ("train", r"batch\[1\]='train' has no batch axis.*functools.partial"),
        (jnp.ones(()), r"batch\[1\]=.* has no batch axis"),
        (jax.random.key(0), r"batch\[1\] is a single key.*one key for each"),
        (np.array(["a"] * len(X)), r"batch\[1\] has dtype <U1.*pass numbers"),
    ],
)
def test_what_is_no_batch_is_named_with_the_remedy(given, words):
    with pytest.raises(ValueError, match=words):
        Call(lambda params, x, other: plain(params, x), batch=(X, given))()


def test_other_names_that_are_missing_are_the_callers_fault():
    with pytest.raises(NameError, match="missing"):
        Call(lambda p, x: missing(p, x))()  # noqa: F821
