"""Finds losses in which the examples of a batch influence each other, or share their randomness.

The loss of one example must be a function of the parameters, of that example and of public constants. So must
its gradient, where somebody wrote the derivative by hand. No clipping covers anything else that they read.
"""

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import batching
from jax.interpreters.partial_eval import dce_jaxpr

from dpx.clipping import jaxprs, losses, reports

_DRAWS = (
    "random_bits", "random_gamma", "random_unwrap", "threefry2x32", "rng_bit_generator", "rng_uniform",
)  # fmt: skip
# Those of the primitives of keys of which `jax.vmap` treats many keys at once.
_BY_KEY = ("random_bits", "random_fold_in", "random_gamma", "random_split", "rng_bit_generator")
# The values of `vmap_method` by which a function on the host is given one example at a time.
_IN_TURN = ("sequential", "sequential_unrolled")
# Fewer numbers than this may agree with numbers in another shape by chance.
_FEW = 32


def check(program: core.ClosedJaxpr, count: int, is_vectorised: bool) -> None:
    """Checks a traced program of (parameters, one example) that returns a loss and its gradients.

    The program includes derivatives that somebody wrote by hand. Its first `count` inputs are parameters.
    `dpx.clipped_grad` says what is refused (ValueError), and what is reported.

    A moving average is refused though the sum keeps its sensitivity: it mixes examples that nobody clipped,
    without noise, and the model reads it in evaluation. It is found where a share of an array, and the rest
    of one of something of the example, are added up to a value that neither the loss nor a gradient needs. It
    is not found where the loss reads one alike, or where the share is not a number in the program.
    """
    jaxpr = program.jaxpr
    own = [i >= count for i in range(len(jaxpr.invars))]
    used = jaxprs.walked(jaxpr, own)
    live: Any = functools.partial(dce_jaxpr, jaxpr, [True] * len(jaxpr.outvars), True)
    if (made := _averages(used)) and made - _averages(jaxprs.walked(live()[0], own)):
        raise ValueError(
            "loss_fn keeps a moving average, as BatchNorm in training mode does, whose statistics mix "
            "examples, so that no clipping bounds what one of them changes: use GroupNorm or LayerNorm, or "
            "frozen statistics (use_running_average=True)"
        )
    for eqn, _, own_axes in used:
        _refuse_collective(eqn, own_axes)
    # A compiled function keeps what it closes over to itself.
    inner = [each for eqn, *_ in used for each in jaxprs.inside(eqn)]
    constants = {id(c): c for each in (program, *inner) for c in each.consts}.values()
    if any(isinstance(constant, jax.Ref) for constant in constants):
        raise ValueError(
            "loss_fn closes over a jax.Ref, in which one example can leave what the next one reads, so that "
            "no clipping bounds what one example changes: make it within the loss, or pass what it holds in "
            "the batch"
        )
    draws = is_vectorised and any(eqn.primitive.name in _BY_KEY for eqn, *_ in used)
    ever = jaxprs.walked(jaxpr, own, ever=True) if draws else ()
    if kinds := [eqn.invars[0].aval.dtype for eqn, given, _ in ever if _by_place(eqn, given)]:
        raise ValueError(
            f"loss_fn draws random numbers from keys of type {kinds[0]}, which JAX draws for all "
            "examples at once and by their places, so that one changes the numbers of the others: use "
            "keys of jax.random.key(seed, impl='threefry2x32'), or microbatch_size=1"
        )
    if (call := reports.call()) is None:
        return
    _check_constants(constants, call)
    for what in _given_all([eqn for eqn, *_ in used]) if is_vectorised else ():
        reports.report(
            f"loss_fn calls {what}, which is given all examples at once, so that what it makes of one may "
            "depend on the others: use microbatch_size=1, which calls it for one example at a time"
        )
    if any(eqn.primitive.name in _DRAWS and not any(of_example) for eqn, of_example, _ in used):
        reports.report(
            "loss_fn draws random numbers from a key that is the same for all examples and steps, such as "
            "that of an nnx.Dropout(rngs=...) or one that it closes over: give every record a key of its own "
            "in the batch, made from a secret key, the step and the record's index, by "
            "dpx.clipping.record_keys, or in dpx.training.fit by record_key=True"
        )


def _averages(used: Sequence[tuple]) -> set[Any]:
    """The types and shares of sums of a share of an array, and of the rest of one of the example."""
    gains, found = {}, set()
    for eqn, of_example, _ in used:
        shared = [v for v, is_own in zip(eqn.invars, of_example, strict=True) if not is_own]
        if eqn.primitive.name in ("mul", "div") and any(v.aval.size == 1 for v in shared):
            gains[eqn.outvars[0]] = jaxprs.gain(eqn)  # None: the program has no such number.
        elif eqn.primitive.name == "add" and len(shared) == 1 < len(jaxprs.variables(eqn)):
            gain, rest = (gains.get(v, np.inf) for v in eqn.invars[:: 1 - 2 * of_example[0]])
            if gain is not None and 0 <= gain < 1 and (rest is None or abs(gain + rest - 1) < 0.01):
                found.add((eqn.outvars[0].aval, gain))
    return found


def _by_place(eqn: Any, of_example: Sequence[bool]) -> bool:
    """Whether an equation, once vectorised, draws from an example's own keys by its place in the batch."""
    if (name := eqn.primitive.name) not in _BY_KEY or not any(of_example):
        return False
    return name == "rng_bit_generator" or not losses.is_by_record(eqn.invars[0].aval.dtype)


def _refuse_collective(eqn: Any, own_axes: frozenset) -> None:
    name, params = eqn.primitive.name, eqn.params
    for axis in jax.tree.leaves((params.get("axis_name"), params.get("axes"))):
        if isinstance(axis, str) and axis not in own_axes and name not in jaxprs.LAYOUT:
            raise ValueError(
                f"loss_fn calls {name} over the axis {axis!r}, which reads what other examples or devices "
                "hold, so that no clipping bounds what one example changes: sum the results of clipped_grad "
                "over that axis instead, and shard models by automatic or explicit axes"
            )


def _given_all(eqns: Sequence[Any]) -> list[str]:
    """The names of what equations call that is given all examples at once, once the loss is vectorised.

    Batching rules that JAX itself defines mix nothing; those of anybody else may.
    """
    names = set()
    for eqn in eqns:
        name = eqn.primitive.name
        # JAX's own call one example after the other, or the rule of the function, which is seen in the loss.
        if name == "custom_vmap_call" and not _is_of_jax(eqn.params["rule"]):
            where = eqn.params["call"].jaxpr.debug_info.func_src_info
            names.add(f"{where} with a batching rule of its own (jax.custom_batching.custom_vmap)")
        method = eqn.params.get("vmap_method")
        if method is not None and method not in _IN_TURN:
            names.add(f"the host ({name} with vmap_method={method!r})")
    for primitive in {eqn.primitive for eqn in eqns}:
        rule = batching.fancy_primitive_batchers.get(primitive)
        if inspect.isfunction(rule):  # JAX may have wrapped it.
            rule = inspect.getclosurevars(rule).nonlocals.get("batcher", rule)
        if rule is not None and not _is_of_jax(rule):
            names.add(f"{primitive.name}, a primitive that is not JAX's own")
    return sorted(names)


def _is_of_jax(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None)).split(".")[0] == "jax"


def _check_constants(constants: Iterable[Any], call: reports.Call) -> None:
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
    """Whether two arrays are one, or are known to hold the same rows, and not by chance.

    One may be the other transposed, or in another shape, if it holds too many numbers for chance.
    """
    if a is b:
        return True
    traced = isinstance(a, Tracer) or isinstance(b, Tracer)
    if traced or jnp.size(a) != jnp.size(b) or not jnp.ndim(a):
        return False
    a, b = (
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in (a, b)
    )
    if a.shape == b.shape:
        return np.array_equal(a, b, equal_nan=True) and not _is_common(a)
    alike = any(np.array_equal(x.reshape(-1), b.reshape(-1), equal_nan=True) for x in (a, a.T))
    return alike and a.size >= _FEW and not (_is_common(a.reshape(-1)) or _is_common(b))


def _is_common(rows: np.ndarray) -> bool:
    """Whether this is 0, 1, 2, ... or one row repeated, which indices, positions and masks may all be."""
    return np.array_equal(rows, np.arange(len(rows))) or bool((rows == rows[:1]).all())
