"""What is made once more for the sum: gradients inside rematerialised blocks.

A block has handed out squared norms alone. Once the clip factors are known it is evaluated again from the
operands that it had, now to hand out what its gradients are made of, whose sum over the batch is made at
once: what one block holds is gone before the next one begins. Blocks in a loop are evaluated again in a loop
over all examples together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.clipping import jaxprs
from dpx.clipping.gradients.forms import Within
from dpx.clipping.gradients.reading import Reader
from dpx.clipping.passes.vmap import over_examples
from dpx.clipping.rounding import accumulator, settled

# For each gradient its number, its form, and the weights of examples.
Members = Mapping[int, tuple[Within, jax.Array]]


def operands(reader: Reader, eqn: Any) -> dict[int, int]:
    """The numbers of an equation's operands that depend on the example, by position."""
    own = enumerate(eqn.invars)
    return {i: reader.value(v) for i, v in own if not reader.is_shared(v)}


def sums(
    reader: Reader, eqn: Any, members: Members, known: Mapping[Any, Any], values: Mapping[int, Any]
) -> dict[int, jax.Array]:
    """The sums over examples of weights times gradients that an equation's body makes.

    Args:
      reader: of the program that the equation is in.
      eqn: a block, or a loop of blocks.
      members: the gradients.
      known: variables that parameters alone decide.
      values: of all examples, by number.
    """
    own = operands(reader, eqn)
    batched = {i: values[n] for i, n in own.items()}
    shared = {
        i: v.val if isinstance(v, core.Literal) else known[v]
        for i, v in enumerate(eqn.invars)
        if i not in own
    }
    made = _of_loop if reader.body(eqn).is_loop else _of_block
    found = made(reader, eqn, members, shared, batched)
    return {k: _moved(members[k][0].moves, x) for k, x in found.items()}


def _of_block(
    reader: Reader, eqn: Any, members: Members, shared: dict[int, Any], batched: dict[int, Any]
) -> dict[int, jax.Array]:
    inner = reader.body(eqn).reader
    numbers = sorted({n for form, _ in members.values() for n in form.sums.numbers})

    def one(own: dict[int, Any]) -> dict[int, Any]:
        arguments = shared | own
        ordered = [arguments[i] for i in range(len(arguments))]
        return settled(inner.run(ordered, numbers, outs=False, inline=True)[1])

    values = over_examples(one, batched)
    return {k: _sum(inner, form, values, weights) for k, (form, weights) in members.items()}


def _sum(inner: Reader, form: Within, values: Any, weights: jax.Array) -> jax.Array:
    shape = inner.jaxpr.outvars[form.which].aval.shape
    return form.sums.weighted_sum(values, weights, shape)


def _of_loop(
    reader: Reader, eqn: Any, members: Members, shared: dict[int, Any], batched: dict[int, Any]
) -> dict[int, jax.Array]:
    inner = reader.body(eqn).reader
    first, last = jaxprs.scan_parts(eqn.params)
    size = len(next(iter(batched.values())))
    numbers = sorted({n for form, _ in members.values() for n in form.sums.numbers})
    carried = {
        i: batched[i]
        if i in batched
        else jnp.broadcast_to(shared[i], (size, *jnp.shape(shared[i])))
        for i in range(first, last)
    }
    slices = {i: jnp.moveaxis(x, 1, 0) for i, x in batched.items() if i >= last}
    fixed = {i: x for i, x in batched.items() if i < first}
    common = {i: x for i, x in shared.items() if i >= last}

    def step(carry: dict[int, Any], xs: Any) -> tuple[dict[int, Any], dict[int, Any]]:
        of_each, of_all = xs
        same = {i: x for i, x in shared.items() if i < first} | of_all

        def one(own: dict[int, Any]) -> tuple[list, dict[int, Any]]:
            arguments = same | own
            ordered = [arguments[i] for i in range(len(eqn.invars))]
            results, found = inner.run(ordered, numbers, inline=True)
            return results[: last - first], settled(found)

        after, values = over_examples(one, fixed | carry | of_each)
        found = {k: _sum(inner, form, values, w) for k, (form, w) in members.items()}
        return dict(zip(range(first, last), after, strict=True)), found

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(step, carried, (slices, common), **options)[1]


def _moved(moves: Sequence[Any], x: jax.Array) -> jax.Array:
    """A sum after equations that rearrange it, in the type that sums have."""
    for eqn in moves:
        if eqn.primitive.name != "convert_element_type":
            (x,) = jaxprs.bind(eqn, [x.astype(accumulator(x.dtype))])
    return x
