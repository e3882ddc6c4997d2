"""What XLA's compiler for CPUs needs so that programs of this package are fast, on one CPU.

Nothing here changes what is computed but for the order of additions. Each trick has a name, by which `off`
turns it off, and is here for what it gains; `python -m experiments.bench.tuning` measures it again.

| trick | what it does |
|---|---|
| rows | sums what is held as a product of matrices with two equal rows, which a library computes |
| in_turn | takes Gram matrices of large factors one example after the other |
| outlined | compiles a long step as a computation of its own, outside the loop that may repeat it |
| filled | fills short arrays up before a step, and long ones in the kernels that read them |
| kept | keeps what blocks under `jax.checkpoint` make where the compiler drops their barriers |
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

from dpx.clipping import jaxprs, meshes

TRICKS = ("rows", "in_turn", "outlined", "filled", "kept")

# Equations of a step that is outlined, those inside of others included: three blocks of a transformer, or one
# long body of a scan.
LONG = 1750

# Numbers of an example up to which a batch is filled before the step.
SHORT = 2**10

# Elements of a factor of one example from which it is worth a loop iteration of its own.
LARGE = 2**16

_off: set[str] = set()


@contextlib.contextmanager
def off(*tricks: str) -> Iterator[None]:
    """Leaves tricks out of what is traced within; what was traced before is forgotten."""
    before = set(_off)
    _off.update(tricks)
    jax.clear_caches()
    try:
        yield
    finally:
        _off.clear()
        _off.update(before)
        jax.clear_caches()


def uses(trick: str) -> bool:
    """Whether programs for this machine use a trick."""
    return trick not in _off and meshes.on_one_cpu()


def keeps_blocks() -> bool:
    """Whether an ordinary step holds the activations of rematerialised blocks, as it does before JAX 0.12."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    return uses("kept") and version < (0, 12)


def by_rows(weights: jax.Array, held: jax.Array) -> jax.Array:
    """Products of (B,) weights with (B, ...) numbers, added up over B: by a matrix with two equal rows."""
    flat = held.reshape(len(held), -1)
    product = jnp.matmul(jnp.stack([weights] * 2), flat, precision=jax.lax.Precision.HIGHEST)
    return product[0].reshape(held.shape[1:])


def in_turn(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A function of a factor of one example, in a loop over examples if it is large."""
    if not uses("in_turn") or x.size < LARGE:
        return function(x)
    return jax.custom_batching.sequential_vmap(function)(x)


def outlined(function: Callable, *arguments: Any) -> tuple[Callable, Any]:
    """A function that takes longer to compile inside a loop, and the shapes that it returns.

    XLA would else go through all of a long one again whenever it simplifies the loop, and hoist what it can
    into the state of the loop. Short ones are compiled as quickly in place, and need less memory there.
    """
    closed, like = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if not uses("outlined") or sum(1 for _ in jaxprs.equations(closed.jaxpr)) < LONG:
        return function, like

    def called(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            found = core.jaxpr_as_fun(closed)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(like), found)

    return called, like


def fills_before(x: jax.Array) -> bool:
    """Whether a batch is filled up before the step: XLA would fill tokens in every kernel that reads them.

    A copy of long arrays, such as images, would take memory for the whole step.
    """
    return "filled" not in _off and math.prod(x.shape[1:]) <= SHORT
