"""Reads gradients off the program that computes them.

`jax.value_and_grad` of one example's loss is traced once. A `Reader` walks back from each gradient through
additions and rearrangements until it meets a product of two values. These, and not their product, are handed
out for every example, and the product is then dead code. `dpx.clipping.gradients.primitives` has the rules
for equations, one function a primitive. This module enters the bodies of loops and of rematerialised blocks,
and runs a program so that it hands values out.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.ref import AbstractRef

from dpx.clipping import jaxprs, xla_cpu
from dpx.clipping.gradients.convolution import Convolution
from dpx.clipping.gradients.outer import Factor, Outer, labels

Terms = list[Outer]

# Primitive -> function of (reader, equation, which of its results) that returns terms, or None.
RULES: dict[str, Callable[["Reader", Any, int], Terms | None]] = {}
# Primitives whose result is zero where these operands are: all of them, or those that are no indices and no
# conditions, or the first one. Of a product one is enough.
_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
_ZERO_IF = {
    **dict.fromkeys(("add", "add_any", "sub", "concatenate", "pad", "stack", *_PRODUCTS), slice(None)),
    "scatter-add": slice(None, None, 2), "dynamic_update_slice": slice(2), "select_n": slice(1, None),
    **dict.fromkeys((
        "broadcast_in_dim", "convert_element_type", "copy", "cumsum", "div", "dynamic_slice", "expand_dims",
        "gather", "neg", "reduce_sum", "reshape", "rev", "slice", "squeeze", "transpose",
    ), slice(1)),
}  # fmt: skip
# A loop that adds up a gradient hands out the factors of all its iterations if these have no more than this
# many times the elements of the gradient.
MOST_FACTORS = 128


def rule(*names: str) -> Callable[[Callable], Callable]:
    """Registers how a result of these primitives is read as a sum of outer products.

    The function takes (reader, equation, which of the equation's results) and returns a list of `Outer`,
    whose sum the result is; None where it is no such sum.
    """

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value that the program has no variable for. It has a shape and a type."""

    aval: Any


class Made(NamedTuple):
    """An equation that a reader adds to a program: a function of values."""

    function: Callable[..., Any]
    invars: tuple[Any, ...]
    outvars: tuple[Value]
    effects: tuple = ()


class Reader:
    """Reads values of a jaxpr as sums of outer products, and runs the jaxpr.

    A value is a variable of the jaxpr, or a `Value`, made of others, or handed out by an equation's body.

    Attributes:
      jaxpr: the jaxpr, without calls.
      consts: its constants.
      shared: the variables that do not depend on the example.
      stopped: for each variable that is no sum of outer products, the primitive that has no rule.
    """

    def __init__(self, closed: Any, shared: Sequence[bool]):
        closed = jaxprs.flat(closed)
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self.shared = set(self.jaxpr.constvars)
        self.shared.update(v for v, s in zip(self.jaxpr.invars, shared, strict=True) if s)
        for eqn in self.jaxpr.eqns:
            refs = (isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars))
            if not eqn.effects and self.shared.issuperset(jaxprs.variables(eqn)) and not any(refs):
                self.shared.update(eqn.outvars)
        self.stopped: dict[Any, str] = {}
        self._eqns: list[Any] = [*self.jaxpr.eqns]
        self._makers = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        self._bodies: dict[tuple[int, int], Reader] = {}
        # By the id of an equation: values of its body, and what stands for them here.
        self._handed: dict[int, dict[Any, Value]] = {}
        self._terms: dict[Any, Terms | None] = {}
        self._zero: dict[Any, bool] = {}

    def maker(self, atom: Any) -> Any:
        """The equation that a value is a result of; None for what none makes."""
        return None if isinstance(atom, core.Literal) else self._makers.get(atom)

    def value(self, atom: Any) -> Any:
        """A variable as it is, or a constant as a value."""
        if not isinstance(atom, core.Literal):
            return atom
        return self.make(lambda: jnp.asarray(atom.val, jnp.result_type(atom.val)))

    def make(self, function: Callable[..., Any], *values: Any) -> Value:
        """The value that a function makes of others."""
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in values]
        made = Value(jax.eval_shape(function, *structs))
        self._eqns.append(Made(function, values, (made,)))
        return made

    def is_shared(self, atom: Any) -> bool:
        """Whether a value is the same for all examples."""
        return isinstance(atom, core.Literal) or atom in self.shared

    def is_zero(self, atom: Any) -> bool:
        """Whether a value is zero whatever the arguments are, as far as they are finite."""
        if isinstance(atom, core.Literal):
            return bool(np.all(np.asarray(atom.val) == 0))
        if atom not in self._zero:
            eqn = self.maker(atom)
            name, operands = ("", []) if eqn is None else (eqn.primitive.name, eqn.invars)
            if eqn and name == "gather" and eqn.params["fill_value"] != 0:
                name = ""  # It may find another number out of bounds.
            needed = map(self.is_zero, operands[_ZERO_IF.get(name, slice(0))])
            zero = any(needed) if name in _PRODUCTS else name in _ZERO_IF and all(needed)
            self._zero[atom] = not atom.aval.size or zero
        return self._zero[atom]

    def terms(self, atom: Any) -> Terms | None:
        """Outer products whose sum a value is; None where it is no such sum."""
        if self.is_zero(atom):
            return []
        if (eqn := self.maker(atom)) is None:
            return None
        if atom not in self._terms:
            name, terms = eqn.primitive.name, None
            if jnp.issubdtype(atom.aval.dtype, jnp.floating) and name in RULES:
                terms = RULES[name](self, eqn, eqn.outvars.index(atom))
            if terms is None:  # The primitive that stopped an operand stops its results too.
                inner = [self.stopped[v] for v in jaxprs.variables(eqn) if v in self.stopped]
                self.stopped[atom] = inner[0] if inner and name in RULES else name
            self._terms[atom] = terms
        return self._terms[atom]

    def each(self, atom: Any, function: Callable[[Outer], Outer | None]) -> Terms | None:
        """The terms of a value, each of them changed; None if any cannot be."""
        terms = self.terms(atom)
        changed = [function(term) for term in terms or ()]
        return None if terms is None or None in changed else changed  # type: ignore[return-value]

    # Bodies of loops and of rematerialised blocks.

    def body(self, eqn: Any, body: Any = None) -> "Reader":
        """The reader of a body of an equation, for which nothing that a loop carries is shared."""
        body = eqn.params["jaxpr"] if body is None else body
        if (key := (id(eqn), id(body))) not in self._bodies:
            closed, (first, last) = jaxprs.as_closed(body), jaxprs.carried(eqn)
            shared = [self.is_shared(v) for v in eqn.invars]
            shared[first:last] = [False] * (last - first)
            # Indices of branches, and what a loop's condition alone reads, are no operands of a body.
            self._bodies[key] = Reader(closed, shared[len(shared) - len(closed.jaxpr.invars) :])
        return self._bodies[key]

    def lifted(self, eqn: Any, which: int) -> Terms | None:
        """The terms of a result of an equation with a body, made of those of the body's own result.

        Iterations of a loop are positions, or, where its results are stacked, entries of their first axis.
        """
        inner, (first, last) = self.body(eqn), jaxprs.carried(eqn)
        if eqn.params.get("length") == 0:
            return []

        def of_block(term: Outer) -> Outer | None:
            (label,), factors = labels(1), []
            for factor in term.factors:
                value, varies = self._outside(eqn, factor.value)
                factors.append(Factor(value, (label, *factor.axes) if varies else factor.axes))
            new = term._replace(left=factors[0], right=factors[1])
            if eqn.primitive.name != "scan":
                return new
            sizes = term.sizes | {label: eqn.params["length"]}
            new = new._replace(axes=((label,), *new.axes), sizes=sizes)
            if which < last - first:  # One product in each iteration is slow.
                new = new._replace(detour=MOST_FACTORS * new.count(itertools.chain(*term.axes)))
                return new.without(0, self)
            return new if any(new.owners(label)) else None

        return inner.each(inner.jaxpr.outvars[which], of_block)

    def _outside(self, eqn: Any, value: Any) -> tuple[Any, bool]:
        """The value here that stands for one of a body, and whether it has an axis of a loop's iterations."""
        inner, (first, last) = self.body(eqn).jaxpr, jaxprs.carried(eqn)
        if value in inner.invars:
            at = inner.invars.index(value)
            if not isinstance(eqn.invars[at], core.Literal) and not first <= at < last:
                return eqn.invars[at], at >= last
        return self.handed(eqn, value), eqn.primitive.name == "scan"

    def handed(self, eqn: Any, value: Any) -> Value:
        """The value here that stands for one that the body of an equation hands out, stacked by a loop."""
        handed = self._handed.setdefault(id(eqn), {})
        if value not in handed:
            leading = (eqn.params["length"],) if eqn.primitive.name == "scan" else ()
            shape = (*leading, *value.aval.shape)
            handed[value] = Value(jax.ShapeDtypeStruct(shape, value.aval.dtype))
        return handed[value]

    def count_from_zero(self, carry: Any, result: Any) -> bool:
        """Whether a body only adds to what it carries; if so, it is read as if that were zero at first."""
        var = carry
        while var is not result:
            users = [eqn for eqn in self.jaxpr.eqns if var in eqn.invars]
            if len(users) != 1 or users[0].primitive.name not in ("add", "add_any"):
                return False
            if users[0].invars.count(var) != 1 or var in self.jaxpr.outvars:
                return False
            (var,) = users[0].outvars
        # Whatever else reads the sum needs what was carried so far.
        read = [v for eqn in self.jaxpr.eqns for v in eqn.invars]
        if result in read or self.jaxpr.outvars.count(result) != 1:
            return False
        self._zero[carry] = True
        return True

    # How the program is run.

    def known(self, leaves: Sequence[Any]) -> dict[Any, Any]:
        """The values of variables that depend on parameters alone, for these parameters."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env.update(zip(self.jaxpr.invars, leaves, strict=False))
        for eqn in self.jaxpr.eqns:
            if eqn.outvars and self.shared.issuperset(eqn.outvars):
                results = jaxprs.bind(eqn, jaxprs.values(eqn.invars, env))
                env.update(zip(eqn.outvars, results, strict=True))
        return env

    def run(
        self, arguments: Sequence[Any], wanted: Sequence[Any], outs: bool = True,
        env: dict | None = None, inline: bool = False,
    ) -> tuple[list, jaxprs.Values]:  # fmt: skip
        """Evaluates the jaxpr, and returns its results, if `outs`, and the wanted values.

        `env` has what is known, and `inline` is whether rematerialised blocks are evaluated like others.
        """
        env = dict(env or ())
        env.update(zip(self.jaxpr.constvars, self.consts, strict=True))
        env.update(zip(self.jaxpr.invars, arguments, strict=True))
        results = self.jaxpr.outvars if outs else []
        live, needed = self.live([*results, *wanted], env)
        for eqn in live:
            given = jaxprs.values(eqn.invars, env)
            handed = {x: y for x, y in self._handed.get(id(eqn), {}).items() if y in needed}
            if isinstance(eqn, Made):
                made = [eqn.function(*given)]
            elif handed:
                made = self._enter(eqn, given, [*handed], inline)
            else:
                made = self._evaluate(eqn, given)
            env.update(zip((*eqn.outvars, *handed.values()), made, strict=True))
        return jaxprs.values(results, env), jaxprs.Values((v, env[v]) for v in wanted)

    def live(self, wanted: Iterable[Any], env: dict) -> tuple[list[Any], set[Any]]:
        """The equations that are needed, and the values that they need."""
        needed, live = {v for v in wanted if not isinstance(v, core.Literal) and v not in env}, []
        for eqn in reversed(self._eqns):
            results = (*eqn.outvars, *self._handed.get(id(eqn), {}).values())
            if eqn.effects or not needed.isdisjoint(results):
                live.append(eqn)
                needed.update(v for v in jaxprs.variables(eqn) if v not in env)
        return live[::-1], needed

    def _evaluate(self, eqn: Any, values: list) -> list:
        name = eqn.primitive.name
        if name == "conv_general_dilated":
            if self.shared.isdisjoint(eqn.invars):
                return [Convolution(eqn).evaluate(*values)]
            # In groups of features the other code is faster.
            if xla_cpu.uses("ordered") and eqn.params["feature_group_count"] == 1:
                return [xla_cpu.ordered(eqn, *values)]
        if name == "reduce_sum" and 1 in eqn.invars[0].aval.shape and xla_cpu.uses("squeezed"):
            return [xla_cpu.squeezed(eqn, *values)]
        if name == "reduce_precision":
            kind, given = jnp.finfo(eqn.invars[0].aval.dtype), eqn.params
            # JAX rounds so what a policy of `jax.checkpoint` saves. While both are used, both are held.
            if (given["exponent_bits"], given["mantissa_bits"]) == (kind.nexp, kind.nmant):
                return values
        if name in ("scan", *jaxprs.REMAT) and self.body(eqn).convolves:
            return self._enter(eqn, values, (), False)
        if (key := {"cond": "branches", "while": "body_jaxpr"}.get(name)) is not None:
            made = jax.tree.map(functools.partial(self._by_products, eqn), eqn.params[key])
            eqn = eqn.replace(params=eqn.params | {key: made})
        return jaxprs.bind(eqn, values)

    @functools.cached_property
    def convolves(self) -> bool:
        """Whether two of the example's own values are convolved, in bodies of equations too."""
        own = [v not in self.shared for v in self.jaxpr.invars]
        used = jaxprs.walked(self.jaxpr, own, ever=True)
        return any(all(x) for eqn, x, _ in used if eqn.primitive.name == "conv_general_dilated")

    def _by_products(self, eqn: Any, body: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """A body with such convolutions made as `_evaluate` makes them."""
        if not (inner := self.body(eqn, body)).convolves:
            return body
        return jax.make_jaxpr(lambda *x: inner.run(x, ())[0])(*body.in_avals)

    def _enter(self, eqn: Any, values: list, wanted: Sequence[Any], inline: bool) -> list:
        """The results of an equation with a body, and the values that the body hands out."""
        inner, (first, last) = self.body(eqn), jaxprs.carried(eqn)

        def block(*arguments: Any) -> list:
            results, more = inner.run(arguments, wanted, inline=inline)
            return [*results, *more.values()]

        def step(carry: list, xs: list) -> tuple[list, list]:
            made = block(*values[:first], *carry, *xs)
            return made[: last - first], made[last - first :]

        if eqn.primitive.name == "scan":
            options = jaxprs.scan_options(eqn)
            carry, ys = lax.scan(step, values[first:last], values[last:], **options)
            return [*carry, *ys]
        if inline:
            return block(*values)
        closed = jax.make_jaxpr(block)(*values)
        block_of = eqn.replace(params=eqn.params | {"jaxpr": jaxprs.opened(closed.jaxpr)})
        return jaxprs.bind(block_of, [*closed.consts, *values])
