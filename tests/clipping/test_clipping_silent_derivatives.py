"""Derivatives and batching rules written by hand that would void the guarantee without a word."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import batching, mlir

import dpx
from dpx.clipping import ClippingWarning

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
BATCH = jnp.asarray(X)
W = {"w": jnp.ones(3)}
METHODS = pytest.mark.parametrize("method", ["auto", pytest.param("vmap", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def _reports_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClippingWarning)
        yield


def clipped(loss, batch=(X,), **options):
    return dpx.clipped_grad(loss, l2_clip_norm=1.0, **options)(W, *batch)


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
    def identity(x):
        return jax.custom_derivatives.linear_call(
            lambda _, x: x * 1.0, lambda _, cotangent: change(cotangent), None, x
        )

    return identity


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


PLACES = pytest.mark.parametrize("place", [in_backward, in_forward, in_tangent, in_transpose])


@METHODS
@PLACES
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c) + x, None), 0.0, length=2)[0],
        lambda f: lambda x: jax.lax.cond(x > 0, f, jnp.sin, x),
    ],
    ids=["plain", "jit", "remat", "scan", "scan from a constant", "branch"],
)
def test_collectives_in_derivatives_are_refused(place, wrap, method):
    loss = loss_of(place(lambda x: jax.lax.psum(x, "rows")), wrap)

    def step(x):
        return clipped(loss, (x,), method=method).grads

    with pytest.raises(ValueError, match="psum over the axis 'rows', which reads what other"):
        jax.vmap(step, axis_name="rows")(np.stack([X, X]))


@METHODS
@PLACES
def test_derivatives_that_close_over_the_batch_are_refused(place, method):
    loss = loss_of(place(lambda x: x * jnp.mean(BATCH)))
    with pytest.raises(ValueError, match="that is also in the batch"):
        clipped(loss, (BATCH,), method=method)
    with pytest.raises(ClippingWarning, match="as many rows as there are examples"):
        clipped(loss, (X + 1,), method=method)
    # JAX cannot vectorise a `linear_call`.
    clipped(loss, (X[:3],), method=method, microbatch_size=1, strict=True)


@PLACES
def test_derivatives_that_draw_alike_are_reported(place):
    key = jax.random.key(0)
    loss = loss_of(place(lambda x: x * jax.random.normal(key)))
    with pytest.raises(ClippingWarning, match="the same for all examples"):
        clipped(loss)


def test_derivatives_that_draw_by_the_example_are_not_reported():
    drawn = jax.custom_vjp(lambda x, key: x * 1.0)
    drawn.defvjp(
        lambda x, key: (x, key),
        lambda key, cotangent: (cotangent * jax.random.normal(key), None),
    )

    def loss(params, x, key):
        return jnp.square(drawn(x @ params["w"], key))

    keys = jax.random.split(jax.random.key(0), len(X))
    assert (clipped(loss, (X, keys), strict=True).norms > 0).all()


def test_what_refuses_some_derivatives_is_read_for_the_others():
    refusing = in_one_operand(lambda x: jax.lax.psum(x, "rows"))
    step = jax.vmap(lambda x: clipped(loss_of(refusing), (x,)).grads, axis_name="rows")
    with pytest.raises(ValueError, match="over the axis 'rows'"):
        step(np.stack([X, X]))


def test_derivatives_within_derivatives_are_not_taken():
    inner = in_backward(lambda x: jax.lax.psum(x, "rows"))
    loss = loss_of(in_backward(inner))
    step = jax.vmap(lambda x: clipped(loss, (x,), strict=True).norms, axis_name="rows")
    np.testing.assert_allclose(step(np.stack([X, X])), [clipped(loss_of(lambda x: x)).norms] * 2)


def centered():
    """What subtracts the mean of all examples where it is vectorised."""

    def less_the_mean(x):
        return x * 1.0

    function = jax.custom_batching.custom_vmap(less_the_mean)
    function.def_vmap(lambda size, batched, x: (x - x.mean(0), True))
    return function


@METHODS
@pytest.mark.parametrize("loss", [
    lambda params, x: jnp.square(centered()(x) @ params["w"]),
    loss_of(in_backward(centered())),
    loss_of(in_forward(centered())),
], ids=["input", "backward", "forward"])  # fmt: skip
def test_batching_rules_are_reported_where_they_are_used(loss, method):
    with pytest.raises(ClippingWarning, match=r"less_the_mean.* with a batching rule of its own"):
        clipped(loss, method=method)
    with pytest.raises(ValueError, match="use microbatch_size=1"):
        clipped(loss, method=method, strict=True)
    alone = clipped(loss, method=method, strict=True, microbatch_size=1)
    want = clipped(loss_of(lambda x: x))
    np.testing.assert_allclose(alone.grads["w"], want.grads["w"], rtol=1e-5)


def test_primitives_that_are_not_of_jax_are_reported():
    """Somebody wrote how they are vectorised; here one example divides all by its own largest entry."""
    primitive = core.Primitive("over_the_largest")
    primitive.def_impl(lambda x: x / np.max(np.abs(x)))
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda x: x / jnp.max(jnp.abs(x)), multiple_results=False)
    )
    batching.primitive_batchers[primitive] = lambda xs, axes: (primitive.bind(xs[0]), axes[0])

    def loss(params, x):
        return jnp.square(primitive.bind(x) @ params["w"])

    with pytest.raises(
        ClippingWarning, match="over_the_largest, a primitive that is not JAX's own"
    ):
        clipped(loss)
    one = clipped(loss, batch=(X[:1],), strict=True)
    many = clipped(loss, strict=True, microbatch_size=1)
    np.testing.assert_allclose(many.norms[0], one.norms[0], rtol=1e-6)


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

    def loss(params, x):
        return jnp.square(primitive.bind(x, jnp.abs(x) + 1, held=(apart,)) @ params["w"])

    with pytest.warns(ClippingWarning, match="divide_apart, a primitive that is not JAX's own"):
        found = clipped(loss)
    want = clipped(lambda params, x: jnp.square(x / (jnp.abs(x) + 1) @ params["w"]))
    np.testing.assert_allclose(found.grads["w"], want.grads["w"], rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "is_reported"),
    [("sequential", False), ("expand_dims", True), ("broadcast_all", True)],
)
def test_the_host_is_reported_where_it_is_given_all_examples(given, is_reported):
    def loss(params, x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        host = jax.pure_callback(lambda x: 2 * np.asarray(x), like, x, vmap_method=given)
        return jnp.square(host @ params["w"])

    if is_reported:
        with pytest.raises(ClippingWarning, match=f"the host .pure_callback.*'{given}'"):
            clipped(loss)
    else:
        assert (clipped(loss, strict=True).norms > 0).all()


def test_what_jax_itself_calls_in_turn_is_not_reported():
    doubled = jax.custom_batching.sequential_vmap(lambda x: 2 * x)
    loss = loss_of(jax.nn.relu)
    found = clipped(lambda params, x: loss(params, doubled(x)), strict=True)
    np.testing.assert_allclose(found.norms, clipped(loss, (2 * X,)).norms, rtol=1e-5)
