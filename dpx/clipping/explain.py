"""Says how each parameter would be clipped, and at what cost."""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from dpx.clipping import engine, params, plan
from dpx.clipping.capture import Capture
from dpx.clipping.plan import Choice

HEADER = ("parameter", "shape", "uses", "rule", "extra MFLOP", "extra KiB")


def explain_clipping(
    loss_fn: Callable, params_: Any, *batch: Any, wrt: Any = None, has_aux: bool = False
) -> None:
    """Prints, for every parameter, its uses, the rule for its norm, and what that costs.

    The rule is "Gram" where norms come from Gram matrices of the factors; "gradient" where the
    per-example gradient of that parameter is held, because it is smaller than its factors; and
    "gradient (no rule for ...)" where a use has no rule. All are exact. Costs are for one example and
    `method="one_pass"`, beyond an ordinary step: operations for the norm and the sum, and bytes of what
    is held from the backward pass to the sum (of which an ordinary step holds a part as well).

    Args:
      loss_fn: as in `clipped_grad`.
      params_: the parameters.
      *batch: arrays with a leading batch axis; only their shapes matter.
      wrt, has_aux: as in `clipped_grad`; what is not trained has no row.
    """
    parameters = params.flatten(params_, wrt)
    loss = params.example_loss(loss_fn, parameters, has_aux)
    program = engine.trace(loss, parameters.leaves, batch)
    rows: list[tuple[str, ...]] = [HEADER]
    flops = held = 0
    for k, (path, leaf) in enumerate(zip(parameters.paths, parameters.leaves, strict=True)):
        choice = program.choices[k]
        extra, kept = _costs(choice, leaf)
        flops, held = flops + extra, held + kept
        uses = collections.Counter(map(plan.describe, program.captured.uses[k]))
        uses += collections.Counter(program.captured.opaque[k])
        names = [name if n == 1 else f"{n}× {name}" for name, n in uses.items()]
        rule = _rule(choice, program.captured, k)
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        listed = ", ".join(names) or "unused"
        rows.append((path, shape, listed, rule, f"{extra / 1e6:.3f}", f"{kept / 1024:.1f}"))
    rows.append(("sum", "", "", "", f"{flops / 1e6:.3f}", f"{held / 1024:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if i > 3 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _costs(choice: Choice, leaf: Any) -> tuple[int, int]:
    """Extra operations, and bytes held, for one example."""
    if (rule := plan.gram(choice)) is not None:
        factors = [(use.left_aval, use.right_aval, math.prod(use.lengths)) for use in rule.uses]
        held = sum(n * (_bytes(left) + _bytes(right)) for left, right, n in factors)
        return plan.gram_flops(rule), held
    return 4 * leaf.size, _bytes(leaf)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


def _rule(choice: Choice, captured: Capture, k: int) -> str:
    if plan.gram(choice) is not None:
        return "Gram"
    if captured.opaque[k]:
        return f"gradient (no rule for {', '.join(sorted(set(captured.opaque[k])))})"
    if captured.uses[k] and choice.rule is None:
        return "gradient (uses split its axes differently)"
    return "gradient"
