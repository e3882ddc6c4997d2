"""Chooses, from shapes alone, the cheapest exact form for the gradient of every parameter."""

import math
from typing import NamedTuple

from dpx.clipping import common, rules
from dpx.clipping.capture import Capture
from dpx.clipping.uses import Use
from dpx.clipping.weights import Weights

# A per-example gradient is held unless its factors have fewer elements by this much: held, it
# needs no second product for the clipped sum.
FAVOR_GRADIENT = 1.5

# A table that is looked up has gradients that are nearly all zeros: they are held only if they
# are the smaller ones.
FAVOR_TABLE = 1.0

# What bounds for an inner product of factors cost, in multiplications that take as long. Measured on CPUs.
PER_INNER_PRODUCT = 100

# The factors of all iterations of a loop that uses a parameter are kept while they are no larger than its
# gradient by this much.
MOST_FACTORS = 128


class Rule(NamedTuple):
    """The uses of a parameter, all of which have a rule and share a layout.

    Attributes:
      uses: the uses.
      layout: that layout.
      by_gram: whether factors are kept, and the norm comes from their Gram matrices.
    """

    uses: tuple[Use, ...]
    layout: rules.Layout
    by_gram: bool

    @property
    def is_masked(self) -> bool:
        """Whether an array multiplies the gradient that neither factor can be multiplied by.

        Then the norm comes from the product of the factors (`dpx.clipping.masked`), also where they are kept.
        """
        return any(use.is_masked for use in self.uses)


class Direct(NamedTuple):
    """Differentiation hands out the per-example gradients of this parameter."""

    rule: Rule | None
    tapped: tuple[Use, ...] = ()


class Factors(NamedTuple):
    """Every use of this parameter hands out its factors."""

    rule: Rule

    @property
    def tapped(self) -> tuple[Use, ...]:
        """The uses whose factors are asked for."""
        return self.rule.uses


class FromInput(NamedTuple):
    """The only use of this parameter hands out its input and the cotangent of its result.

    The norm comes from the factors that these make. They are not kept, because they repeat entries of the
    input, as patches do: the sum is made of input and cotangent.
    """

    rule: Rule

    @property
    def tapped(self) -> tuple[Use, ...]:
        """The use whose input is asked for."""
        return tuple(use.without_factors() for use in self.rule.uses)


class InPlace(NamedTuple):
    """The only use of this parameter hands out no more than squared norms."""

    rule: Rule

    @property
    def tapped(self) -> tuple[Use, ...]:
        """The uses whose factors are asked for."""
        return self.rule.uses


Choice = Direct | Factors | FromInput | InPlace


def choose(captured: Capture, weights: Weights | None = None) -> list[Choice]:
    """How each parameter is treated where norms and sums come from one pass."""
    choices = []
    found = zip(captured.shapes, captured.uses, captured.opaque, strict=True)
    for k, (shape, uses, opaque) in enumerate(found):
        leads = [] if weights is None else weights.leads(k)
        factored = [use for use in uses if use.by_factors]
        layout = rules.layout(factored, shape) if factored and not opaque else None
        if uses and not factored and not opaque:
            layout = rules.Layout(shape, (), (), tuple(i for i, n in enumerate(shape) if n > 1))
        if leads and not uses and not opaque:
            layout = rules.Layout(shape, (), (), tuple(i for i, n in enumerate(shape) if n > 1))
        if layout is None or 0 in shape:
            choices.append(Direct(None))
            continue
        is_table = any(use.indexed is not None for use in uses)
        favor = FAVOR_TABLE if is_table else FAVOR_GRADIENT
        kept = sum(map(factor_elements, uses))
        closed = len(factored) == len(uses)
        if weights is not None:
            kept += sum(weights.smalls[j].var.aval.size for j, *_ in leads)
            closed &= common.has_closed_form(weights, k, layout, captured.splits[k])
            closed &= not (leads and any(use.is_masked for use in uses))
        by_gram = closed and math.prod(shape) > favor * kept
        if not by_gram:
            # A scan that shares the parameter would stack a gradient for every iteration.
            uses = [u if u.is_shared_by_loop else u.without_factors() for u in uses]
        rule = Rule(tuple(uses), layout, by_gram)
        taps = by_gram or any(_prefers_product(use, math.prod(shape)) for use in uses)
        choices.append(Factors(rule) if taps else Direct(rule))
    return choices


def from_input(choice: Choice) -> Choice:
    """The same for a pass that sums over all examples at once: no factor is kept that repeats its input."""
    if not isinstance(choice, Factors) or not choice.rule.by_gram:
        return choice
    repeats = [
        use.gradient is not None
        and not use.loops
        and use.scale is None
        and math.prod(use.left_aval.shape) > math.prod(use.gradient.aval.shape)
        for use in choice.rule.uses
    ]
    return FromInput(choice.rule) if repeats == [True] else choice


def in_place(choice: Choice, kept: bool) -> Choice:
    """The same for a pass that keeps norms only, unless a parameter is `kept`: one use hands out no more."""
    rule = choice.rule
    if rule is None or not rule.uses:
        return choice
    if isinstance(choice, Direct) and any(use.is_shared_by_loop for use in rule.uses):
        return choice  # The factors of so many iterations are not kept here either.
    alone = len(rule.uses) == 1 and rule.uses[0].scale is None and not kept
    if not alone or rule.uses[0].is_shared_by_loop:
        return Factors(rule)
    # Nothing is held here, so that time alone decides.
    return InPlace(rule._replace(by_gram=rule.by_gram or _is_quicker_by_gram(rule)))


def gram(choice: Choice) -> Rule | None:
    """The rule of a parameter whose norm comes from Gram matrices; None for any other."""
    return choice.rule if choice.rule is not None and choice.rule.by_gram else None


def unruled(captured: Capture, k: int, choice: Choice) -> list[str]:
    """The primitives because of which a parameter that is used has no rule; none where it has one."""
    if captured.opaque[k]:
        return captured.opaque[k]
    # Each use has a rule, but they split the parameter's axes differently.
    return [use.primitive for use in captured.uses[k]] if choice.rule is None else []


def _prefers_product(use: Use, size: int) -> bool:
    """Whether the gradient of a parameter of `size` elements is better made here than by differentiation."""
    # Differentiation would add up one outer product per iteration of a scan. That is slow, but factors of all
    # iterations of a long one would take far more memory than the gradient.
    in_loop = use.is_shared_by_loop and factor_elements(use) <= MOST_FACTORS * size
    # It would turn a batch of convolutions into one with a group for every example.
    is_convolution = use.primitive == "conv_general_dilated"
    scaled = use.scale is not None  # Of which differentiation of the parameter knows nothing.
    return scaled or in_loop or is_convolution


def factor_elements(use: Use) -> int:
    """Elements of both factors of one example."""
    one = math.prod(use.left_aval.shape) + math.prod(use.right_aval.shape)
    return math.prod(use.lengths) * one


def gram_flops(rule: Rule) -> int:
    """Floating-point operations of the Gram matrices of one example."""
    blocks, rows, columns = rule.layout.sizes()
    if rule.is_masked:
        count = sum(positions(use, rule.layout) for use in rule.uses)
        return 2 * (1 + (count > 1)) * count * blocks * rows * columns
    total, seen = 0, []
    for use in rule.uses:
        seen.append((positions(use, rule.layout), use.indexed is not None))
        count, indexed = seen[-1]
        for other_count, other_indexed in seen:
            inner = columns + (1 if indexed or other_indexed else rows)
            total += 2 * blocks * count * other_count * inner
    return total


def positions(use: Use, layout: rules.Layout) -> int:
    """The number P of positions in the factors of a use."""
    right = math.prod(use.lengths) * math.prod(use.right_aval.shape)
    blocks, rows, columns = layout.sizes()
    return right // (blocks * (columns if rules.is_left_rows(use, layout) else rows))


def _is_quicker_by_gram(rule: Rule) -> bool:
    """Whether the norm of the gradient of one use takes less time by Gram matrices than by the gradient."""
    (use,) = rule.uses
    if not use.by_factors or use.indexed is not None:
        return False
    count, (_, rows, columns) = positions(use, rule.layout), rule.layout.sizes()
    # Multiplications for each position.
    return count * (rows + columns + PER_INNER_PRODUCT) < rows * columns


def describe(use: Use) -> str:
    """The use in a word or two, for people."""
    scaled = " of a function of it" if use.scale is not None else ""
    loops = "".join(" in scan" + (" (sliced)" if loop.axes else "") for loop in use.loops)
    return use.primitive + scaled + loops
