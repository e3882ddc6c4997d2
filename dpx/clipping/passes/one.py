"""Clipping of a batch: what one backward pass hands out, its norms, and its sum.

The program that was read is run for every example (`jax.vmap`), and hands out what the forms of gradients are
made of. Norms come from that, and so does the sum once the clip factors are known.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from dpx.clipping import jaxprs, meshes
from dpx.clipping.gradients import plan
from dpx.clipping.gradients.bundles import Bundle, bundles
from dpx.clipping.gradients.plan import Program
from dpx.clipping.losses import Loss
from dpx.clipping.passes import again
from dpx.clipping.passes.vmap import Clipping, Pass, over_examples
from dpx.clipping.rounding import settled


def by(method: str) -> Callable[..., Clipping]:
    """How a method clips: by what it keeps from the backward pass, but for blocks that it evaluates again."""

    def clip(
        loss: Loss, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int], vectorised: bool
    ) -> Clipping:
        program = plan.trace(loss, leaves, batch, plan.made_again(method), vectorised)
        return clipping(program, leaves, batch, groups)

    return clip


def clipping(
    program: Program, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int]
) -> Clipping:
    """Runs a program that was read."""
    reader, forms = program.reader, program.forms
    made_again = {w.key: (k, w) for k, form in enumerate(forms) for w in form.again}
    entered = {id(w.eqn): w.eqn for _, w in made_again.values()}
    given = [n for eqn in entered.values() for n in again.operands(reader, eqn).values()]
    wanted = sorted({program.loss, *given, *(n for form in forms for n in form.numbers)})
    known = reader.known(leaves)

    def one(*example: Any) -> Any:
        _, found = reader.run([*leaves, *example], wanted, outs=False, env=known)
        return found[program.loss], settled(found)

    together = bundles(forms, groups, reader.avals)
    hand, size = pruned(one, *jax.tree.leaves(meshes.one_example(batch)))

    def make(number: int, values: Any, weights: Sequence[jax.Array]) -> dict[int, jax.Array]:
        members = {
            key: (w, weights[groups[k]])
            for key, (k, w) in made_again.items()
            if id(w.eqn) == number
        }
        return again.sums(reader, entered[number], members, known, values)

    def run(batch: Any) -> Pass:
        flat = jax.tree.leaves(batch)
        losses, values = over_examples(lambda example: hand(*example), flat)

        def norm(bundle: Bundle) -> jax.Array:
            given = {n: values[n] for n in bundle.numbers}
            return jax.vmap(bundle.squared_norm, axis_size=len(flat[0]))(given)

        norms = [(group, norm(bundle)) for group, bundle in together]

        def weighted_sum(weights: Sequence[jax.Array]) -> list[jax.Array]:
            found = values
            for number, eqn in entered.items():
                given = {n: values[n] for n in again.operands(reader, eqn).values()}
                made, _ = pruned(functools.partial(make, number), given, list(weights))
                # A branch begins when its condition is known. A compiler that drops barriers, such as that
                # for CPUs, would else recompute activations for both passes at once, and hold those of all
                # blocks.
                like = meshes.zeros(jax.eval_shape(made, given, list(weights)))
                some = jnp.any(jnp.stack([jnp.any(w > 0) for w in weights]))
                nothing = functools.partial(_constant, like)
                found = found | lax.cond(some, made, nothing, given, list(weights))
            sums: dict[int, jax.Array] = {}
            for group, bundle in together:
                shapes = [leaves[k].shape for k in bundle.members]
                each = bundle.sums(found, weights[group], shapes)
                sums |= zip(bundle.members, each, strict=True)
            return [sums[k] for k in range(len(leaves))]

        return Pass(losses, norms, weighted_sum)

    return Clipping(run, size)


def _constant(value: Any, *_: Any) -> Any:
    return value


def pruned(function: Callable, *like: Any) -> tuple[Callable, int]:
    """The same function without what its results do not need, in loops too, and the bytes that it holds."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(live, closed.consts))
    structure = jax.tree.structure(shapes)
    size = jaxprs.peak_bytes(live)
    return lambda *a: jax.tree.unflatten(structure, evaluate(*jax.tree.leaves(a))), size
