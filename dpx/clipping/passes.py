"""One backward pass over a batch, the norms that come from it, and the sum.

The program that was read is run for every example (`jax.vmap`), and hands out what the forms of gradients are
made of. Norms come from that, and so does the sum once the clip factors are known.

A rematerialised block hands out squared norms alone. For the sum it is evaluated again from its operands, and
hands out what its gradients are made of, whose sum over the batch is made at once: what one block holds is
gone before the next one begins. Blocks in a loop are evaluated again in a loop over all examples together.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from dpx.clipping import jaxprs, meshes
from dpx.clipping.gradients.forms import Form, Values, together
from dpx.clipping.gradients.reading import Reader
from dpx.clipping.losses import is_vectorised
from dpx.clipping.rounding import accumulator, settled


def over_examples(function: Callable[..., Any], *batch: Any) -> Any:
    """`function` of every example, stacked.

    One example alone is not vectorised: some primitives have no rule for that.
    """
    if not is_vectorised(batch):
        results = function(*jax.tree.map(lambda x: x[0], batch))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], results)
    try:
        return jax.vmap(function)(*batch)
    except NotImplementedError as error:
        error.add_note(
            "A primitive of loss_fn cannot be vectorised over examples by jax.vmap: use "
            "clipped_grad(..., microbatch_size=1), which takes one example at a time without it."
        )
        raise


def clipping(
    reader: Reader,
    forms: Sequence[Form],
    leaves: Sequence[jax.Array],
    batch: Any,
    groups: Sequence[int],
) -> tuple[Callable[[Any], tuple[jax.Array, list, Callable]], int]:
    """The backward pass as a function of a batch of any size, and the bytes that one example takes, about.

    Of `batch` only shapes matter. `groups` has the group of every parameter array. The function returns:

    - (B,) losses;
    - pairs of a group and (B,) squared norms of a part of its gradients, rounded up so far that no
      contribution is longer, and not finite where a gradient is not;
    - a function of (B,) weights for each group that returns, for each array, sum_b weights[b]·gradient[b].
    """
    loss = reader.value(reader.jaxpr.outvars[0])
    again = {w: group for form, group in zip(forms, groups, strict=True) for w in form.again}
    blocks = {id(within.eqn): within.eqn for within in again}.values()
    operands = {id(eqn): [v for v in eqn.invars if not reader.is_shared(v)] for eqn in blocks}
    needs = itertools.chain(*(form.needs for form in forms), *operands.values())
    wanted, known = [*dict.fromkeys(needs)], reader.known(leaves)

    def one(*example: Any) -> tuple[jax.Array, Values]:
        _, values = reader.run([*leaves, *example], [loss, *wanted], outs=False, env=known)
        return values.pop(loss), settled(values)

    live, _ = reader.live([loss, *wanted], known)
    hand, size = one, jaxprs.peak_bytes(SimpleNamespace(eqns=live, outvars=[loss, *wanted]))
    if any(len(body.jaxpr.eqns) > 1 for eqn in live for body in jaxprs.inside(eqn)):
        hand, size = pruned(one, *jax.tree.leaves(meshes.one_example(batch)))

    def run(batch: Any) -> tuple[jax.Array, list, Callable]:
        flat = jax.tree.leaves(batch)
        losses, values = over_examples(hand, *flat)
        norms = []
        for group, own in together(forms, groups):
            given = Values((v, values[v]) for form in own for v in form.needs)
            norm = functools.partial(own[0].squared_norm, more=own[1:])
            norms.append((group, jax.vmap(norm, axis_size=len(flat[0]))(given)))

        def weighted_sum(weights: Sequence[jax.Array]) -> list[jax.Array]:
            have = values.copy()
            for eqn in blocks:
                own = {w: weights[group] for w, group in again.items() if w.eqn is eqn}
                given = Values((v, values[v]) for v in operands[id(eqn)]), Values(own)
                made, _ = pruned(functools.partial(_made_again, reader, eqn, known), *given)
                # A branch begins when its condition is known. A compiler that drops barriers, such as that
                # for CPUs, would else recompute activations for both passes at once, and hold those of all
                # blocks.
                nothing = meshes.zeros(jax.eval_shape(made, *given))
                some = jnp.any(jnp.stack([jnp.any(w > 0) for w in weights]))
                have |= lax.cond(some, made, lambda *_: nothing, *given)  # noqa: B023
            each = zip(forms, groups, leaves, strict=True)
            return [
                form.weighted_sum(have, weights[group], leaf.shape) for form, group, leaf in each
            ]

        return losses, norms, weighted_sum

    return run, size


def _made_again(reader: Reader, eqn: Any, known: dict, values: Values, weights: Values) -> Values:
    """The sums over examples of weights times the gradients that a block, or a loop of blocks, makes.

    Its operands are `known`, if they are the same for all examples, or among `values`. The keys of `weights`
    are the gradients, which are of the form `Within`.
    """
    inner, (first, last) = reader.body(eqn), jaxprs.carried(eqn)
    needs = [*dict.fromkeys(value for within in weights for value in within.sums.needs)]
    given = jaxprs.values(eqn.invars, known | values)
    is_own = [not reader.is_shared(v) or first <= i < last for i, v in enumerate(eqn.invars)]

    def step(carry: list, slices: list) -> tuple[list, Values]:
        operands = [*given[:first], *carry, *slices]

        def one(*own: Any) -> tuple[list, Values]:
            rest = iter(own)
            each = [next(rest) if own else x for x, own in zip(operands, is_own, strict=True)]
            results, handed = inner.run(each, needs, outs=last > first, inline=True)
            return results[: last - first], settled(handed)

        after, handed = over_examples(one, *itertools.compress(operands, is_own))
        sums = Values()
        for within, of_examples in weights.items():
            shape = inner.jaxpr.outvars[within.which].aval.shape
            sums[within] = within.sums.weighted_sum(handed, of_examples, shape)
        return after, sums

    if eqn.primitive.name == "scan":
        start, each = given[first:last], zip(given[last:], is_own[last:], strict=True)
        slices = [jnp.moveaxis(x, 1, 0) if own else x for x, own in each]
        for i, v in enumerate(eqn.invars[first:last]):
            if reader.is_shared(v):
                size = len(next(iter(weights.values())))
                start[i] = jnp.broadcast_to(start[i], (size, *v.aval.shape))
        sums = lax.scan(step, start, slices, **jaxprs.scan_options(eqn))[1]
    else:
        sums = step([], [])[1]
    for within, x in sums.items():
        for eqn in within.moves:  # In the type that sums have.
            if eqn.primitive.name != "convert_element_type":
                (x,) = jaxprs.bind(eqn, [x.astype(accumulator(x.dtype))])
        sums[within] = x
    return sums


def pruned(function: Callable, *like: Any) -> tuple[Callable, int]:
    """A function without what its results do not need, in bodies too, and the bytes that it holds."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(live, closed.consts))
    structure = jax.tree.structure(shapes)
    return lambda *a: structure.unflatten(evaluate(*jax.tree.leaves(a))), jaxprs.peak_bytes(live)
