"""The loss of one example, traced and read, and how each of its parameters is to be clipped."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from dpx.clipping import common, grams, meshes, mixing, reports
from dpx.clipping import parts as _parts
from dpx.clipping import plan as _plan
from dpx.clipping.capture import Capture, capture
from dpx.clipping.joint import Sums
from dpx.clipping.materialize import Loss, Pass, is_vectorised
from dpx.clipping.parts import Parts
from dpx.clipping.plan import Choice
from dpx.clipping.rounding import gamma, in_products
from dpx.clipping.weights import Weights

# Parameters with fewer elements are not cut: their per-example gradients are held.
LEAST_CUT = 4096


class Program(NamedTuple):
    """The loss of one example, traced, and what was found in it.

    Attributes:
      closed: the loss.
      captured: the uses of parameters, in the loss or in what is left of it without `weights`.
      choices: how each parameter is treated.
      weights: its functions of parameters alone, where they were taken out.
      parts: where parameters are cut, if any are; all else here is about the parts.
    """

    closed: core.ClosedJaxpr
    captured: Capture
    choices: list[Choice]
    weights: Weights | None = None
    parts: Parts | None = None

    @property
    def one_pass(self) -> list[Choice]:
        """How each parameter is treated in a pass that sums over all examples at once."""
        # Several devices would reduce each product that such a sum is made of.
        if jax.device_count() > 1 or self.weights is not None:
            return self.choices
        return [_plan.from_input(choice) for choice in self.choices]

    def of_parts(
        self,
        run: Callable[[Sequence[jax.Array], Sequence[int]], Pass],
        leaves: Sequence[jax.Array],
        groups: Sequence[int],
    ) -> Pass:
        """What `run` finds for the parts of parameters, as what is found for the parameters."""
        if (parts := self.parts) is None:
            return run(leaves, groups)
        done = run(parts.of(leaves), [groups[k] for k in parts.owners])

        def weighted_sum(weights: Sequence[jax.Array]) -> list[jax.Array] | Sums:
            sums = done.weighted_sum(weights)
            if isinstance(sums, Sums):
                return dataclasses.replace(sums, parts=parts)
            return parts.whole(sums)

        return done._replace(weighted_sum=weighted_sum)


def trace(loss: Loss, leaves: Sequence[jax.Array], batch: Any) -> Program:
    """Traces the loss of one example and chooses how to treat each parameter.

    Raises:
      ValueError: for a loss that mixes examples, and, in a strict call, for what `reports` says.
    """
    closed = jax.make_jaxpr(loss)(list(leaves), meshes.one_example(batch))
    mixing.check(closed, len(leaves), is_vectorised(batch))
    # What does not reach the loss would else count as a use.
    live, _ = dce_jaxpr(closed.jaxpr, [True], instantiate=True)
    closed = core.ClosedJaxpr(live, closed.consts)
    program = _planned(closed, len(leaves))
    wanted = [k for k in sorted(program.captured.sliced) if leaves[k].size >= LEAST_CUT]
    while wanted:
        cut, parts = _parts.cut(closed, len(leaves), wanted)
        in_parts = _planned(cut, len(parts.owners))
        good = [k for k in wanted if _is_worth_it(in_parts, parts, k)]
        if good == wanted:
            program = in_parts._replace(parts=parts)
            break
        wanted = good
    reports.check_fallbacks(
        [_plan.unruled(program.captured, k, choice) for k, choice in enumerate(program.choices)],
        program.parts,
    )
    return program


def _planned(closed: core.ClosedJaxpr, count: int) -> Program:
    captured, weights = capture(closed, count), None
    if (found := common.separate(closed, count, captured)) is not None:
        weights, captured = found
    return Program(closed, captured, _plan.choose(captured, weights), weights)


def _is_worth_it(program: Program, parts: Parts, param: int) -> bool:
    """Whether the gradient of a parameter that is cut need not be held."""
    if parts.cuts[param] is None:
        return False
    choices = zip(program.choices, parts.owners, strict=True)
    return any(_plan.gram(choice) is not None for choice, owner in choices if owner == param)


def rounding(program: Program, size: int, dtype: Any) -> float:
    """How far the sum over `size` examples is off at most, over the sum of their thresholds.

    The sum of n terms in any order errs by γ_n times the sum of their lengths: of one held gradient for each
    example; or of one product for each of P positions, and those lengths exceed that of their sum by
    1 / `grams.FLOOR` at most.
    """
    shares = [gamma(size + 4, dtype)]
    for k, choice in enumerate(program.choices):
        if (rule := _plan.gram(choice)) is not None:
            places = sum(_plan.positions(use, rule.layout) for use in rule.uses)
            arrays = 0 if program.weights is None else len(program.weights.leads(k))
            terms = in_products(size * (places + arrays)) + len(rule.uses) + arrays + 4
            shares.append(gamma(terms, dtype) / grams.FLOOR)
    return max(shares)
