"""Clipping without the per-example gradients of large parameters.

One backward pass yields, for each parameter, either its per-example gradients (where those are
smaller than what they are made of, or where a use has no rule) or the factors they are made of.
Norms come from either, and so does the clipped sum once the clip factors are known: no second
backward pass. `dpx.clipping.two_pass` forgets both and makes a second backward pass instead.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.clipping import alike, common, fixed_terms, grams, masked, meshes, own_products, rules
from dpx.clipping import plan as _plan
from dpx.clipping.joint import Sums
from dpx.clipping.materialize import Loss, Pass, accumulator, over_examples
from dpx.clipping.own_products import Own
from dpx.clipping.plan import Choice, Direct, FromInput
from dpx.clipping.program import Program, trace
from dpx.clipping.rounding import settled, sum_of_squares
from dpx.clipping.tap import Tapped
from dpx.clipping.uses import Use
from dpx.clipping.views import to_matrices

# Numbers of a factor, of all examples, from which on a copy of it takes time and memory.
LARGE = 2**18


def one_pass(loss: Loss, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int]) -> Pass:
    """Keeps what the norms are computed from, and sums it with the clip factors."""
    return run(trace(loss, leaves, batch), leaves, batch, groups)


def run(program: Program, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int]) -> Pass:
    """The pass that keeps what the norms are computed from."""
    return program.of_parts(functools.partial(_run, program, batch), leaves, groups)


def _run(program: Program, batch: Any, leaves: Sequence[jax.Array], groups: Sequence[int]) -> Pass:
    choices = program.one_pass
    later = [
        [settles_later(program, choice, use, batch) for use in choice.tapped] for choice in choices
    ]

    def hold(found: Sequence[Found]) -> tuple[list, list, list]:
        gradients = {
            k: assemble(choice, found[k])
            for k, choice in enumerate(choices)
            if _plan.gram(choice) is None
        }
        gradients = settled(gradients)
        held, seen = [], []
        for k, choice in enumerate(choices):
            if k in gradients:
                kept = summed = gradients[k]
            else:
                kept = assemble(choice, found[k])
                both = list(map(rules.in_both_forms, kept, later[k]))
                kept, summed = [normed for normed, _ in both], [summed for _, summed in both]
            held.append(found[k].given[0] if isinstance(choice, FromInput) else summed)
            if (rule := _plan.gram(choice)) is None:
                seen.append(kept)
            elif found[k].terms or rule.is_masked:
                seen.append(squared_norm(choice, kept, found[k]))
            else:
                seen.append(grams.products(rule.layout, kept))
        return held, seen, [each.coefficients for each in found]

    losses, (held, seen, coefficients), common_ = backward(
        program, choices, leaves, batch, hold, later
    )

    norms, joined = alike.squared_norms(choices, seen, groups)

    def weighted_sum(weights: Sequence[jax.Array]) -> Sums:
        # Two equal rows: XLA's CPU compiler leaves a product of matrices to a library, but writes a kernel of
        # its own for a vector times each shape of matrix, which is no faster and takes long to compile.
        # Several devices would add up both.
        copies = 2 if jax.device_count() == 1 else 1
        rows = [jnp.stack([w] * copies) for w in weights]
        together = [_held_sums(x, rows[groups[joint.members[0]]]) for joint, x in joined]
        is_joint = {k for joint, _ in joined for k in joint.members}
        alone = {}
        for k, (choice, kept) in enumerate(zip(choices, held, strict=True)):
            if k in is_joint:
                continue
            mine = weights[groups[k]]
            if (rule := _plan.gram(choice)) is None:
                total = _held_sums(kept, rows[groups[k]])[0].reshape(leaves[k].shape)
            elif isinstance(choice, FromInput):
                operands, cotangents = kept
                total = _sum_of_products(choice, operands, cotangents, mine)
            else:
                total = rules.weighted_sum(rule.layout, kept, mine).reshape(leaves[k].shape)
                if common_ is not None:
                    total = common_.finished(rule, total, coefficients[k], mine)
            alone[k] = total
        return Sums(alone, together, tuple(joint for joint, _ in joined))

    return Pass(losses, norms, weighted_sum)


class Found(NamedTuple):
    """What one example's backward pass found for one parameter.

    Attributes:
      given: its gradient if it is not tapped, or the list of what its uses hand out.
      coefficients: what fixed arrays are multiplied by in its gradient.
      terms: (such an array, its coefficient, whether it is the parameter itself), as
        `fixed_terms.squared_norm` takes them, or to be added up.
      scale: for a use, what its product is multiplied by, arranged for the parameter, or None.
      owns: for each use its product with the parameter itself, if that is known.
    """

    given: Any
    coefficients: dict[str, jax.Array] | None = None
    terms: Sequence[tuple[jax.Array, jax.Array, bool]] = ()
    scale: Callable[[Use], jax.Array | None] = lambda use: None
    owns: Sequence[Own | None] = ()


def backward(
    program: Program,
    choices: Sequence[Choice],
    leaves: Sequence[jax.Array],
    batch: Any,
    hold: Callable[[Sequence[Found]], Any],
    later: Sequence[Sequence[bool]],
) -> tuple[jax.Array, Any, common.Batch | None]:
    """Losses, what `hold` makes of what is found for all parameters, and what parameters alone give.

    All of it for every example, except for the last. `hold` settles what is `later`, by choice and by use.
    """
    taps = [
        (use, _both if isinstance(choice, FromInput) else export(use))
        for choice in choices
        for use in choice.tapped
    ]
    weights = program.weights
    fixed = (
        common.Batch(weights, program.captured, choices, leaves) if weights is not None else None
    )
    with_result = [] if fixed is None else fixed.with_result
    inner = program.closed if weights is None else weights.inner
    tapped = Tapped(inner, taps, with_result, settled_later=list(itertools.chain(*later)))
    direct = {k: leaves[k] for k, choice in enumerate(choices) if not choice.tapped}
    over = meshes.varying(leaves, batch)
    slots = meshes.vary(tapped.slots(), over)
    inputs, derived = ([], []) if fixed is None else meshes.vary(fixed.inputs, over)

    def one(example: list[Any]) -> tuple[jax.Array, Any]:
        def value(direct: dict, slots: dict, inputs: list) -> jax.Array:
            arguments = [direct.get(k, leaf) for k, leaf in enumerate(leaves)]
            return tapped([*arguments, *inputs, *derived, *example], slots)[0]

        loss, (gradients, handed, smalls) = jax.value_and_grad(value, (0, 1, 2))(
            direct, slots, inputs
        )
        handed = iter(handed.values())
        given = [
            gradients[k] if isinstance(c, Direct) else [next(handed) for _ in c.tapped]
            for k, c in enumerate(choices)
        ]
        found = (
            map(Found, given) if fixed is None else map(Found, given, *fixed.terms(given, smalls))
        )
        return loss, hold(list(found))

    return (*over_examples(one, jax.tree.leaves(batch)), fixed)


def settles_later(program: Program, choice: Choice, use: Use, batch: Any) -> bool:
    """Whether the factors of a use are settled in the forms that norms and sums read, not where it is tapped.

    What is small is copied sooner than compiled twice, and functions of weights read factors where they are.
    """
    size = len(jax.tree.leaves(batch)[0]) * max(use.left_aval.size, use.right_aval.size)
    is_read_alone = program.weights is None and _plan.gram(choice) is not None
    return use.is_product and is_read_alone and size >= LARGE


def export(use: Use) -> Callable[..., Any]:
    """What a use hands out: its factors, and what its result is asked for."""

    if not use.by_factors:
        assert use.gradient is not None
        return use.gradient.product

    def factors(left: jax.Array, right: jax.Array, *result: jax.Array) -> tuple:
        return left, right, *(own_products.dots(use, right, each) for each in result)

    return factors


def _both(operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return operand, cotangent


def assemble(choice: Choice, found: Found) -> Any:
    """One example's gradient, or its factors as matrices."""
    if isinstance(choice, Direct):
        return _with_terms(found.given, found)
    layout = choice.rule.layout
    if isinstance(choice, FromInput):
        (use,), ((operand, cotangent),) = choice.rule.uses, found.given
        return [rules.pair(use, layout, use.left((operand,)), use.right(cotangent))]
    pairs, gradients = [], []
    for use, each in zip(choice.tapped, found.given, strict=True):
        if not use.by_factors:
            gradients.append(_to_parameter(each, use, layout.shape))
            continue
        pair, scale = rules.pair(use, layout, *each[:2]), found.scale(use)
        if scale is not None and not choice.rule.is_masked:
            pair = fixed_terms.scaled(pair, scale)
        pairs.append(pair)
    if choice.rule.by_gram:
        return pairs
    if pairs:
        product, array = rules.product(layout, pairs), found.scale(choice.tapped[0])
        masked_by = array if choice.rule.is_masked else None
        gradients.append(layout.restore(product if masked_by is None else product * masked_by))
    return _with_terms(functools.reduce(jnp.add, gradients), found)


def _to_parameter(array: jax.Array, use: Use, shape: Sequence[int]) -> jax.Array:
    """Brings the gradient of one example that a use without factors hands out, loops leading, to `shape`."""
    assert use.gradient is not None
    loops = [
        loop.axes if loop.axes or loop.length == 1 else (-1 - i,)
        for i, loop in enumerate(use.loops)
    ]
    axes = (*loops, *use.gradient.axes)
    labels = {label for axis in axes for label in axis}
    atoms = tuple(sorted(label for label in labels if label >= 0))
    found = to_matrices(array, axes, shape, atoms, [label for label in labels if label < 0], ())
    return found.sum((1, 2)).reshape(shape)


def _with_terms(gradient: jax.Array, found: Found) -> jax.Array:
    for array, coefficient, _ in found.terms:
        term = array * coefficient
        gradient = gradient.reshape(term.shape).astype(accumulator(gradient.dtype)) + term
    return gradient


def squared_norm(choice: Choice, held: Any, found: Found) -> jax.Array:
    if (rule := _plan.gram(choice)) is None:
        return sum_of_squares(held)
    if rule.is_masked:
        array = found.scale(rule.uses[0])
        assert array is not None
        return masked.squared_norm(rule.layout, held, array)
    if found.terms:
        scaled = any(own and use.scale for use, own in zip(choice.tapped, found.owns, strict=True))
        least_scale = own_products.SMALLEST_SCALE if scaled else 1.0
        dots = [own and own.scaled for own in found.owns]
        return fixed_terms.squared_norm(rule.layout, held, found.terms, dots, least_scale)
    return grams.squared_norm(rule.layout, held)


def _sum_of_products(
    choice: FromInput, operands: jax.Array, cotangents: jax.Array, weights: jax.Array
) -> jax.Array:
    """The sum over examples of gradients times weights, from what these are made of."""
    (use,) = choice.rule.uses
    assert use.gradient is not None
    weights = weights.astype(accumulator(cotangents.dtype))
    both = operands, cotangents * weights.reshape(-1, *[1] * (cotangents.ndim - 1))
    total = use.gradient.product(*map(_joined, both, use.gradient.examples))
    return _to_parameter(total, use, choice.rule.layout.shape)


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """All examples as one, along an axis of each."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


@jax.jit  # Traced once for all gradients of one shape.
def _held_sums(held: jax.Array, rows: jax.Array) -> jax.Array:
    """The sums over examples of held gradients times weights: one, flat, for each row of weights."""
    dtype = accumulator(held.dtype)
    flat = held.astype(dtype).reshape(len(held), -1)
    return jnp.matmul(rows.astype(dtype), flat, precision=rules.HIGHEST)
