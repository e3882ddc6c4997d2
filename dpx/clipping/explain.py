"""Says how each parameter would be clipped, and at what cost."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from dpx.clipping import batches, losses, params, passes
from dpx.clipping.gradients import plan
from dpx.clipping.gradients.forms import Form


class ParameterClipping(NamedTuple):
    """How one parameter is clipped.

    Attributes:
      path, shape: its name, e.g. `params/Dense_0/kernel`, and shape.
      uses: the primitives that use it, one entry for each use.
      rule: one of those that `explain_clipping` lists.
      extra_flops, extra_bytes: for one example, the operations for its norm and sum, and what is held for it.
    """

    path: str
    shape: tuple[int, ...]
    uses: tuple[str, ...]
    rule: str
    extra_flops: int
    extra_bytes: int

    @property
    def has_rule(self) -> bool:
        """Whether every use has a rule, so that no per-example gradient has to be held."""
        return self.rule in ("Gram", "gradient", "zero")


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain_clipping` returns. Its `str` is a table.

    Attributes:
      rows, batch_size: one row for each parameter; the size of the batch.
      microbatch_size: the number of examples that are processed at a time on this machine by default.
      example_bytes: the bytes that one example takes, about, from its forward pass to its sum.
    """

    rows: tuple[ParameterClipping, ...]
    batch_size: int
    microbatch_size: int
    example_bytes: int

    @property
    def extra_flops(self) -> int:
        """The sum over parameters, for one example."""
        return sum(row.extra_flops for row in self.rows)

    @property
    def extra_bytes(self) -> int:
        """The sum over parameters, for one example."""
        return sum(row.extra_bytes for row in self.rows)

    def __repr__(self) -> str:
        return f"<Explanation of {len(self.rows)} parameters: print it, or see its rows>"

    def __str__(self) -> str:
        header = ("parameter", "shape", "uses", "rule", "extra MFLOP", "extra KiB")
        rows = [header, *map(_cells, self.rows), ("sum", "", "", "", *_numbers(self))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(f"{x:{side}{n}}" for x, side, n in zip(row, "<<<<>>", widths, strict=True))
            for row in rows
        )
        size = f"{self.microbatch_size} of {self.batch_size} examples at a time"
        last = f"{size}, about {self.example_bytes / 2**20:.2f} MiB for each"
        return "\n".join([*map(str.rstrip, lines), last])


def explain_clipping(
    loss_fn: Callable, params_: Any, *batch: Any, wrt: Any = None, has_aux: bool = False
) -> Explanation:
    """Prints, and returns, for every parameter its uses, the rule for its norm, and what that costs.

    All rules are exact. The rule is
      - "Gram" where norms come from Gram matrices of the factors;
      - "gradient" where the per-example gradient is held, because it is smaller than its factors;
      - "gradient (no rule for ...)" where it is held because a primitive has no rule by which it would be
        known to be a sum of products, which costs what `vmap(grad)` costs;
      - "gradient (uses split its axes differently)" where they have rules, but no rows and columns in common;
      - "zero" where it is zero for all examples.

    Costs are for one example and `method="one_pass"`, beyond an ordinary step: operations for the norm and
    the sum, and bytes that are held from the backward pass to the sum. The last line has the microbatch that
    is chosen on this machine.

        slow = [row for row in dpx.explain_clipping(loss_fn, params, *batch).rows if not row.has_rule]

    Args:
      loss_fn: as in `clipped_grad`.
      params_: the parameters.
      *batch: arrays with a leading batch axis; only their shapes matter.
      wrt, has_aux: as in `clipped_grad`; what is not trained has no row.
    """
    parameters = params.flatten(params_, wrt)
    loss, _ = losses.functions(loss_fn, has_aux, parameters)
    (size, _), batch = batches.checked(batch), batches.as_jax(batch)
    reader = plan.read(loss, parameters.leaves, batch)
    outs, leaves = reader.jaxpr.outvars[1:], parameters.leaves
    _, one = passes.clipping(reader, plan.forms(reader, "auto"), leaves, batch, [0] * len(leaves))
    uses = [plan.uses(reader, out) for out in outs]
    rows = tuple(map(_row, parameters.paths, leaves, plan.forms(reader), uses))
    explanation = Explanation(rows, size, batches.chosen(size, one, leaves), one)
    print(explanation)
    return explanation


def _row(path: str, leaf: Any, form: Form, uses: tuple[str, ...]) -> ParameterClipping:
    """How a parameter is clipped, at the cost of one example."""
    held = sum(v.aval.size * jnp.dtype(v.aval.dtype).itemsize for v in form.needs)
    flops = sum(each.gram_flops for each in form.products) or 4 * leaf.size * bool(form.needs)
    if len(form.unruled) > 1:
        rule = "gradient (uses split its axes differently)"
    elif form.unruled:
        rule = f"gradient (no rule for {form.unruled[0]})"
    else:
        rule = "Gram" if form.products else "gradient" if form.needs else "zero"
    return ParameterClipping(path, leaf.shape, uses, rule, flops, held)


def _cells(row: ParameterClipping) -> tuple[str, ...]:
    uses = [name if n == 1 else f"{n}× {name}" for name, n in Counter(row.uses).items()]
    shape = "×".join(map(str, row.shape)) or "scalar"
    return row.path, shape, ", ".join(uses) or "unused", row.rule, *_numbers(row)


def _numbers(of: ParameterClipping | Explanation) -> tuple[str, str]:
    return f"{of.extra_flops / 1e6:.3f}", f"{of.extra_bytes / 1024:.1f}"
