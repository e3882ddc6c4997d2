"""Finds losses in which the examples of a batch influence each other, or share their randomness.

The loss of one example must be a function of the parameters, of that example and of public constants, and so
must its gradient, where somebody wrote the derivative by hand. No clipping covers whatever else they read.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from dpx.clipping import jaxprs, randomness, reports

# The method of Flax (NNX and Linen), Haiku and those who write their own; frozen statistics sum nothing.
_BATCH_NORM = "BatchNorm.__call__"

_DRAWS = (
    "random_bits", "random_gamma", "random_unwrap", "threefry2x32", "rng_bit_generator", "rng_uniform",
)  # fmt: skip

# Primitives of which `jax.vmap` treats many keys at once.
_BY_KEY = ("random_bits", "random_fold_in", "random_gamma", "random_split", "rng_bit_generator")

# How a function on the host is given one example alone.
_IN_TURN = ("sequential", "sequential_unrolled")
# Fewer numbers in another shape may be the same by chance.
_FEW = 32


def check(
    closed: core.ClosedJaxpr, gradients: core.ClosedJaxpr, count: int, is_vectorised: bool
) -> None:
    """Checks a traced loss of (parameters, one example), and the program of its gradients.

    Derivatives that somebody wrote by hand are a part of that program.

    - A BatchNorm in training mode takes its statistics from the whole batch. The loss of one example has no
      batch: there the layer would normalise an example by itself alone, and what it keeps for later would be
      statistics of private data without noise. It is found by the Python functions that made the
      equations of the loss, which JAX keeps for its error messages: a sum that was made within a method
      `BatchNorm.__call__`. A layer of another name, or one that a compiled function hides, is not found.
    - A collective over a named axis, such as `lax.pmean`, reads what other examples or devices hold.
    - Keys of the implementations `rbg` and `unsafe_rbg`, vectorised, draw by the places of examples.
    - A mutable array (`jax.Ref`) that the loss closes over carries values from one example to the next.
    - An array of the batch, or of as many rows as the batch, that the loss closes over holds other examples.
    - A batching rule that is not JAX's own, of a primitive or of `custom_vmap`, and a function on the host
      that is not called for one example after the other, are given all examples at once.
    - Random numbers from a key that does not depend on the example are the same for all of them, such as the
      masks of an `nnx.Dropout` with a state of its own.
    - A parameter that no gradient reaches gets nothing but noise.

    Args:
      closed: the loss.
      gradients: the program that computes them, of the same arguments.
      count: how many of its inputs are parameters.
      is_vectorised: whether it will be, over more than one example.

    Raises:
      ValueError: for the first four, and for an array of the batch that is closed over; for the rest in a
        strict call, which else warns.
    """
    constants = {id(constant): constant for each in (closed, gradients) for constant in each.consts}
    of_all, known = set(), _primitives_of_jax(sum(name.startswith("jax") for name in sys.modules))
    for eqn, _ in _equations(closed.jaxpr):
        _refuse_batch_norm(
            eqn
        )  # Gradients of frozen statistics are sums that such a layer makes, too.
    for eqn, own_axes in (*_equations(closed.jaxpr), *_equations(gradients.jaxpr)):
        _refuse_collective(eqn, own_axes)
        of_all |= _given_all(eqn, known)
        for called in jaxprs.inside(eqn):
            # A compiled function keeps what it closes over to itself.
            constants |= {id(constant): constant for constant in getattr(called, "consts", ())}
    if any(isinstance(constant, jax.Ref) for constant in constants.values()):
        raise ValueError(
            "loss_fn closes over a jax.Ref, in which one example can leave what the next one reads, so that "
            "no clipping bounds what one example changes: make it within the loss, or pass what it holds in "
            "the batch"
        )
    draws = _Draws(count, closed.jaxpr, gradients.jaxpr)
    if draws.by_place and is_vectorised:
        raise ValueError(
            f"loss_fn draws random numbers from keys of type {draws.by_place}, which JAX draws for all "
            "examples at once and by their places, so that one changes the numbers of the others: use "
            "keys of jax.random.key(seed, impl='threefry2x32'), or microbatch_size=1"
        )
    call = reports.call()
    if call is None:
        return
    _check_constants(list(constants.values()), call)
    for what in sorted(of_all) if is_vectorised else ():
        reports.report(
            f"loss_fn calls {what}, which is given all examples at once, so that what it makes of one may "
            "depend on the others: use microbatch_size=1, which calls it for one example at a time"
        )
    if draws.alike:
        reports.report(
            "loss_fn draws random numbers from a key that is the same for all examples and steps, such as "
            "that of an nnx.Dropout(rngs=...) or one that it closes over: give every record a key of its own "
            "in the batch, made from a secret key, the step and the record's index, by "
            "dpx.clipping.record_keys, or in dpx.training.fit by record_key=True"
        )


def _refuse_batch_norm(eqn: Any) -> None:
    traceback = eqn.source_info.traceback
    if eqn.primitive.name == "reduce_sum" and traceback is not None:
        functions, _ = traceback.raw_frames()
        if any(function.co_qualname.endswith(_BATCH_NORM) for function in functions):
            raise ValueError(
                "loss_fn uses BatchNorm in training mode, whose statistics mix examples, so that no "
                "clipping bounds what one of them changes: use GroupNorm or LayerNorm, or frozen "
                "statistics (use_running_average=True)"
            )


def _refuse_collective(eqn: Any, own_axes: frozenset) -> None:
    name = eqn.primitive.name
    if name in jaxprs.LAYOUT:
        return
    axes = [eqn.params.get("axis_name"), eqn.params.get("axes")]
    named = [
        axis
        for given in axes
        for axis in (given if isinstance(given, tuple | list) else (given,))
        if isinstance(axis, str) and axis not in own_axes
    ]
    if named:
        raise ValueError(
            f"loss_fn calls {name} over the axis {named[0]!r}, which reads what other examples or devices "
            "hold, so that no clipping bounds what one example changes: sum the results of clipped_grad over "
            "that axis instead, and shard models by automatic or explicit axes"
        )


def _given_all(eqn: Any, known: frozenset) -> set[str]:
    """What an equation calls that is given all examples at once, once the loss is vectorised.

    That are primitives that are not `known`, for which somebody wrote what `jax.vmap` does.
    """
    name = eqn.primitive.name
    if name == "custom_vmap_call":
        rule = vars(eqn.params["rule"])
        name = rule.get("__qualname__", "")
        # That of a derivative calls the rule of the function, which is seen in the loss.
        if name != "sequential_vmap.<locals>.rule" and not name.startswith("custom_vmap_jvp"):
            where = eqn.params["call"].jaxpr.debug_info.func_src_info
            return {f"{where} with a batching rule of its own (jax.custom_batching.custom_vmap)"}
    if eqn.primitive not in known:
        return {f"{name}, a primitive that is not JAX's own"}
    method = eqn.params.get("vmap_method")
    if method is not None and method not in _IN_TURN:
        return {f"the host ({name} with vmap_method={method!r})"}
    return set()


@functools.cache
def _primitives_of_jax(modules: int) -> frozenset:
    """The primitives that JAX defines, in as many modules as are loaded."""
    names = [name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib")]
    every = [value for name in names for value in list(vars(sys.modules[name]).values())]
    return frozenset(value for value in every if isinstance(value, core.Primitive))


def _check_constants(constants: Sequence[Any], call: reports.Call) -> None:
    own = {id(leaf) for leaf in call.parameters.constants}
    for constant in constants:
        shape = tuple(getattr(constant, "shape", ()))
        what = f"loss_fn closes over an array of shape {shape}"
        if any(_same(constant, leaf) for leaf in call.private):
            raise ValueError(
                f"{what} that is also in the batch, or holds the data it is taken from, so that the loss of "
                "one example reads the others: use the example that loss_fn is called with"
            )
        if call.sizes.intersection(shape[:1]) and id(constant) not in own:
            reports.report(
                f"{what}, with as many rows as there are examples. If they are examples, no "
                "clipping bounds what one of them changes: pass them in the batch. If they are constants, "
                "such as weights that are not trained, this can be ignored, or silenced by "
                "warnings.simplefilter('ignore', dpx.clipping.ClippingWarning)"
            )


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays are one, or hold the same rows where their values are known, and not by chance.

    They may be transposed or of another shape, if they are so many that this cannot be chance.
    """
    if a is b:
        return True
    traced = isinstance(a, Tracer) or isinstance(b, Tracer)
    if traced or jnp.size(a) != jnp.size(b) or not jnp.ndim(a):
        return False
    if jnp.shape(a) != jnp.shape(b) and jnp.size(a) < _FEW:
        return False
    a, b = (
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in (a, b)
    )
    if a.shape == b.shape:
        return np.array_equal(a, b) and not _is_common(a)
    alike = any(np.array_equal(x.reshape(-1), b.reshape(-1)) for x in (a, a.T))
    return alike and not (_is_common(a.reshape(-1)) or _is_common(b))


def _is_common(rows: np.ndarray) -> bool:
    """Whether this is 0, 1, 2, ... or one row repeated, which indices, positions and masks may all be."""
    return np.array_equal(rows, np.arange(len(rows))) or bool((rows == rows[:1]).all())


def _equations(
    jaxpr: Any, own_axes: frozenset = frozenset(), seen: set | None = None
) -> Iterator[tuple[Any, frozenset]]:
    """The equations of a jaxpr and of all that it calls, each once, and the loss's own named axes there.

    These are the axes of a `shard_map` within the loss: its devices hold parts of one example.
    """
    seen = set() if seen is None else seen
    seen.add((id(jaxpr), own_axes))
    for eqn in jaxpr.eqns:
        yield eqn, own_axes
        inside = own_axes
        if eqn.primitive.name == "shard_map":
            inside |= eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
        for called in jaxprs.inside(eqn):
            inner = getattr(called, "jaxpr", called)
            if (id(inner), inside) not in seen:
                yield from _equations(inner, inside, seen)


class _Draws:
    """How a loss draws random numbers.

    Attributes:
      alike: whether some come from nothing of the example's own.
      by_place: the type of keys, if they are the example's own and drawn from by its place in the batch.
    """

    def __init__(self, count: int, *programs: Any):
        self.alike, self.by_place = False, ""
        for jaxpr in programs:
            own = [not trained for trained in jaxprs.first_inputs(jaxpr, count)]
            jaxprs.follow(jaxpr, own, self._visit, always=True)

    def _visit(self, eqn: Any, given: Sequence[bool]) -> bool:
        name = eqn.primitive.name
        if name in _DRAWS:
            self.alike |= not any(given)
        if name in _BY_KEY and any(given):
            kind = eqn.invars[0].aval.dtype
            if name == "rng_bit_generator" or not randomness.is_by_record(kind):
                self.by_place = str(kind)
        return False
