"""Clipping in two backward passes, with the memory of an ordinary step.

The losses of all examples are differentiated once: with respect to the parameters, which the examples share,
and to what every example has of its own, empty slots for the most part (`dpx.clipping.tap`). That takes one
forward pass, and holds what an ordinary step holds: the inputs of blocks, if `jax.checkpoint` recomputes the
rest. The function that pulls cotangents back is then used twice: a cotangent of one for every loss gives the
examples' own part, from which norms follow, and the clip factors give the sum.

What is not asked of a pull is dead code, which is taken out here, from loops and recomputed blocks too: the
first pass multiplies no gradients of parameters, and the second computes no norms. What follows the last
rematerialised block is part of the first alone (`dpx.clipping.tail`). Some of the rest is written otherwise
(`dpx.clipping.rewriting`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.ref import AbstractRef

from dpx.clipping import common, engine, grams, linear, meshes, rewriting, rules
from dpx.clipping import plan as _plan
from dpx.clipping import tail as _tail
from dpx.clipping.engine import Found
from dpx.clipping.jaxprs import first_inputs, follow, nested, run, variables
from dpx.clipping.materialize import Loss, Norms, Pass, accumulator, over_examples
from dpx.clipping.plan import Choice, Direct, InPlace
from dpx.clipping.program import Program, trace
from dpx.clipping.rounding import gamma, settled, sum_of_squares
from dpx.clipping.tap import Tapped
from dpx.clipping.uses import Use
from dpx.clipping.weights import Weights


def auto(loss: Loss, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int]) -> Pass:
    """One pass; two where the model recomputes activations to save memory, and its derivative is linear."""
    program = trace(loss, leaves, batch)
    # Without a parameter of which norms are enough, the first pass already has all gradients.
    saves = any(not isinstance(_plan.in_place(c, False), Direct) for c in program.choices)
    if program.captured.checkpointed and saves:
        with jax.default_matmul_precision("highest"):
            precise = trace(loss, leaves, batch)
            jaxpr = precise.closed.jaxpr
            clear = not _rounds(precise, leaves) and not _writes(jaxpr)
            if clear and linear.unclear(jaxpr, len(leaves)) is None:
                return _run(precise, leaves, batch, groups)
    return engine.run(program, leaves, batch, groups)


def two_pass(loss: Loss, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int]) -> Pass:
    """Keeps norms only; the sum is the gradient of the losses weighted by the clip factors.

    Both passes take the products inside the loss at the highest precision: sums at a lower one would not be
    what the norms bound.

    Raises:
      ValueError: parameters are narrower than float32, or the loss rounds anything to less, or multiplies
        them at a precision below the highest that it chose itself: the sum over examples would be rounded. Or
        the loss has a backward pass of its own that is not known to be linear, or writes to a `jax.Ref`.
    """
    with jax.default_matmul_precision("highest"):
        program = trace(loss, leaves, batch)
        if _rounds(program, leaves):
            raise ValueError(
                "method='two_pass' needs parameters in float32, a loss that casts nothing to lower "
                "precision, and no products of parameters at a `precision` below 'highest', because it would "
                "round the sum before noise is added; use 'one_pass'."
            )
        if _writes(program.closed.jaxpr):
            raise ValueError(
                "method='two_pass' needs a loss that writes to no jax.Ref, because it goes through parts of "
                "the loss twice; use 'one_pass'."
            )
        if (name := linear.unclear(program.closed.jaxpr, len(leaves))) is not None:
            raise ValueError(
                f"method='two_pass' needs linear derivatives, and the backward pass of {name} is not known "
                "to be: an example could add more than the threshold; use 'one_pass', which scales the "
                "gradients themselves."
            )
        return _run(program, leaves, batch, groups)


def _rounds(program: Program, leaves: Sequence[jax.Array]) -> bool:
    """Whether differentiation would round to less than float32, or sum over the batch in less."""
    narrow = any(accumulator(p.dtype) != p.dtype for p in leaves)
    return narrow or program.captured.imprecise or _narrows(program.closed.jaxpr, len(leaves))


def _writes(jaxpr: Any) -> bool:
    """Whether a jaxpr has mutable arrays, whose equations depend on more than on their operands."""
    return any(
        isinstance(v.aval, AbstractRef)
        for outer in jaxpr.eqns
        for eqn in nested(outer)
        for v in (*eqn.invars, *eqn.outvars)
    )


def _narrows(jaxpr: Any, count: int) -> bool:
    """Whether anything made of the first `count` inputs is rounded to less than float32.

    Cotangents are then rounded there too.
    """
    found = False

    def visit(eqn: Any, given: Sequence[bool]) -> bool:
        nonlocal found
        types = [v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")]
        floats = (t for t in types if jnp.issubdtype(t, jnp.floating))
        narrow = any(accumulator(t) != t for t in floats)
        found |= any(given) and (eqn.primitive.name == "reduce_precision" or narrow)
        return False

    follow(jaxpr, first_inputs(jaxpr, count), visit)
    return found


def _run(program: Program, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int]) -> Pass:
    return program.of_parts(functools.partial(_in_two_passes, program, batch), leaves, groups)


def _in_two_passes(
    program: Program, batch: Any, leaves: Sequence[jax.Array], groups: Sequence[int]
) -> Pass:
    weights, flat = program.weights, jax.tree.leaves(batch)
    tail = _tail.find(program)
    led = {k for k in range(len(leaves)) if weights is not None and weights.leads(k)}
    choices = [_plan.in_place(c, k in led | tail.uses) for k, c in enumerate(program.choices)]
    inner, with_result, fixed = program.closed, [], None
    if weights is not None:
        fixed = common.Batch(weights, program.captured, choices, leaves)
        inner, with_result = weights.inner, fixed.with_result
    (smalls, derived), to_leaves = jax.vjp(functools.partial(_inputs, weights), list(leaves))
    taps = [(use, _export(choice, use)) for choice in choices for use in choice.tapped]
    tapped = Tapped(inner, taps, with_result, (tail.start, tail.crossing), stacked=True)
    over = meshes.varying(leaves, batch)

    def of_each(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (flat[0].shape[0], *x.shape))

    # Where a use has no rule, every example has a copy of the parameter, so that its gradient is its own.
    direct = {k: leaves[k] for k, choice in enumerate(choices) if isinstance(choice, Direct)}
    own = jax.tree.map(of_each, (direct, tapped.slots(), smalls))
    shared = {k: leaf for k, leaf in enumerate(leaves) if k not in direct}, derived

    def losses_of(own: Any, shared: Any) -> jax.Array:
        rest, derived = shared

        def loss(given: Any) -> jax.Array:
            example, (direct, slots, smalls) = given
            parameters = direct | rest
            arguments = [parameters[k] for k in range(len(leaves))]
            return tapped([*arguments, *smalls, *derived, *example], slots)[0]

        return over_examples(loss, (flat, own))

    losses, pull = rewriting.vjp(losses_of, *meshes.vary((own, shared), over))
    pull = _only(pull, losses)

    def crossing(own: Any, shared: Any) -> list:
        return [own[1][-1 - i] for i in range(len(tail.crossing))]

    def norms_of(own: Any) -> tuple[list[jax.Array], dict[int, Any]]:
        gradients, slots, smalls = own
        handed = iter([slots[i] for i in range(len(taps))])
        given = [
            gradients[k] if isinstance(c, Direct) else [next(handed) for _ in c.tapped]
            for k, c in enumerate(choices)
        ]
        found = (
            map(Found, given) if fixed is None else map(Found, given, *fixed.terms(given, smalls))
        )
        norms, kept = [], {}
        for k, (choice, each) in enumerate(zip(choices, found, strict=True)):
            if isinstance(choice, InPlace):
                (parts,) = each.given  # One for every iteration of the scans around the use.
                error = 1.01 * gamma(parts.size + 2, parts.dtype)
                norms.append(jnp.sum(parts) * (1 + error))
                continue
            held = engine.assemble(choice, each)
            if k in tail.uses:
                held = kept[k] = settled(held)
            norms.append(engine.squared_norm(choice, held, each))
        return norms, kept

    ones = meshes.vary(jnp.ones_like(losses), meshes.varying(losses))
    if fixed is not None:
        # No constant: the coefficient of a penalty would be one that is spread over examples before a barrier
        # and over a parameter after it, which XLA's compiler for CPUs (0.10.2, __ynn_fusion) gets wrong.
        positive = (losses > 0).astype(losses.dtype)
        ones = positive + (1 - positive)
    own, known = pull(ones, lambda own, shared: (own, crossing(own, shared)))
    norms, kept = over_examples(norms_of, own)

    def gradients(members: Sequence[int], factors: jax.Array) -> list[jax.Array]:
        def asked(own: Any, shared: Any) -> Any:
            (direct, _, smalls), (rest, derived) = own, shared
            found = [direct[k] if k in direct else rest[k] for k in members]
            return found, smalls, derived

        scaled = [jax.vmap(jnp.multiply)(x, _rounded_down(factors, x.dtype)) for x in known]
        factors = _rounded_down(factors, losses.dtype)
        found, smalls, derived = pull(factors, asked, crossing, scaled)
        smalls = jax.tree.map(lambda x: jnp.sum(x, 0), smalls)
        with jax.default_matmul_precision("highest"):
            (by_inputs,) = to_leaves((smalls, derived))
        sums = [jnp.sum(g, 0) if k in direct else g for k, g in zip(members, found, strict=True)]
        return [total + by_inputs[k] for k, total in zip(members, sums, strict=True)]

    def weighted_sum(weights: Sequence[jax.Array]) -> list[jax.Array]:
        together: dict[int, list[int]] = {}
        for k, group in enumerate(groups):
            if k not in kept:
                together.setdefault(group, []).append(k)
        sums = {k: _sum(choices[k], held, weights[groups[k]]) for k, held in kept.items()}
        for group, members in together.items():
            factors = weights[group]
            zeros = meshes.vary([jnp.zeros_like(leaves[k]) for k in members], over)
            # A branch begins when its condition is known. A compiler that drops barriers, such as that for
            # CPUs, would else recompute activations for both passes at once, and hold them.
            found = jax.lax.cond(
                jnp.any(factors > 0),
                functools.partial(gradients, members),
                lambda _, zeros=zeros: zeros,
                factors,
            )
            sums |= dict(zip(members, found, strict=True))
        return [sums[k] for k in range(len(leaves))]

    squared = [Norms((group,), norm[None]) for group, norm in zip(groups, norms, strict=True)]
    return Pass(losses, squared, weighted_sum)


def _sum(choice: Choice, held: Any, weights: jax.Array) -> jax.Array:
    """The sum over examples of what was held of their gradients, times weights."""
    if (rule := _plan.gram(choice)) is not None:
        return rules.weighted_sum(rule.layout, held, weights)
    return jnp.tensordot(weights, held, 1, precision=rules.HIGHEST)


def _inputs(weights: Weights | None, leaves: list[jax.Array]) -> tuple[list, list]:
    """The small values and derived weights that a loss takes, if they are taken out of it."""
    if weights is None:
        return [], []
    smalls, derived = weights.values(leaves)
    return [v for v, small in zip(smalls, weights.smalls, strict=True) if small.is_input], derived


def _only(pull: Callable[[jax.Array], Any], like: jax.Array) -> Callable[..., Any]:
    """A function that pulls a cotangent back to what is selected, and computes nothing else.

    It can be told cotangents on the way that are `known`: then nothing is computed that only leads to them.
    """
    closed, shapes = jax.make_jaxpr(pull, return_shape=True)(like)
    closed = rewriting.rewritten(closed)
    leaves, tree = jax.tree.flatten(shapes)
    numbers = tree.unflatten(range(len(leaves)))

    def pulled(
        cotangent: jax.Array,
        select: Callable[..., Any],
        known: Callable[..., list[int]] = lambda *_: [],
        values: Sequence[jax.Array] = (),
    ) -> Any:
        selected, given = select(*numbers), known(*numbers)
        wanted = jax.tree.leaves(selected)
        used = {*wanted, *given}
        live, _ = dce_jaxpr(closed.jaxpr, [i in used for i in range(len(leaves))], instantiate=True)
        outs = dict(zip(sorted(used), live.outvars, strict=True))
        env = dict(zip([*live.constvars, *live.invars], [*closed.consts, cotangent], strict=True))
        env |= {
            outs[i]: x for i, x in zip(given, values, strict=True) if isinstance(outs[i], core.Var)
        }
        needed, eqns = {outs[i] for i in wanted if isinstance(outs[i], core.Var)}, []
        for eqn in reversed(live.eqns):
            if any(v in needed and v not in env for v in eqn.outvars):
                eqns.append(eqn)
                needed.update(variables(eqn))
        found = run(eqns[::-1], env, [outs[i] for i in wanted])
        return jax.tree.unflatten(jax.tree.structure(selected), found)

    return pulled


def _rounded_down(weights: jax.Array, dtype: Any) -> jax.Array:
    """Weights in the dtype of the losses, never larger than they were: clip factors must not grow."""
    cast = weights.astype(dtype)
    return jnp.where(
        cast.astype(weights.dtype) > weights, jnp.nextafter(cast, jnp.zeros_like(cast)), cast
    )


def _export(choice: Choice, use: Use) -> Callable[..., Any]:
    """What a use hands out: a squared norm if that is all that is wanted of its parameter, or its factors."""
    if not isinstance(choice, InPlace):
        return engine.export(use)
    if not use.by_factors:
        product = engine.export(use)
        return lambda operand, cotangent: sum_of_squares(product(operand, cotangent))
    layout = choice.rule.layout
    sliced = {axis for loop in use.loops for axis in loop.axes}
    layout = layout._replace(blocks=tuple(b for b in layout.blocks if b not in sliced))
    use = use._replace(loops=())

    def squared_norm(left: jax.Array, right: jax.Array) -> jax.Array:
        return _squared_norm(layout, choice.rule.by_gram, rules.pair(use, layout, left, right))

    return squared_norm


@functools.partial(jax.jit, static_argnums=(0, 1))  # Traced once for all uses alike.
def _squared_norm(layout: rules.Layout, by_gram: bool, pair: rules.Pair) -> jax.Array:
    """That of the gradient of one use, from its factors."""
    if by_gram:
        return grams.squared_norm(layout, [pair])
    if pair.rows.ndim == 3 and pair.rows.size > pair.columns.size:
        # The larger factor second, as a product wants it: no transposed copy of the gradient.
        turned = layout._replace(rows=layout.columns, columns=layout.rows)
        return sum_of_squares(rules.product(turned, [rules.Pair(pair.columns, pair.rows)]))
    return sum_of_squares(rules.product(layout, [pair]))
