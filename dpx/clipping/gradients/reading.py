"""Reads gradients off the program that computes them.

`jax.value_and_grad` of one example's loss is traced once. A `Reader` walks back from each gradient through
additions and rearrangements until it meets a product of two values. These, and not their product, are handed
out for every example, and the product is then dead code. Which equation does what is said in
`dpx.clipping.gradients.primitives`, one function a primitive. Here is how values get their numbers, how
bodies of loops and of rematerialised blocks are entered, and how a program is run so that it hands values
out.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.ref import AbstractRef

from dpx.clipping import jaxprs
from dpx.clipping.gradients import convolution
from dpx.clipping.gradients.outer import Factor, NoFormError, Outer, labels

Terms = list[Outer]

# Primitive -> function of (reader, equation, which of its results) that returns terms, or None.
RULES: dict[str, Callable[["Reader", Any, int], Terms | None]] = {}


def rule(*names: str) -> Callable[[Callable], Callable]:
    """Registers how a result of these primitives is read as a sum of outer products.

    The function takes (reader, equation, which of the equation's results) and returns a list of `Outer`,
    whose sum the result is; None where it is no such sum.
    """

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Made(NamedTuple):
    """A value that is computed from others before it is handed out: variables, or numbers of values."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Inner(NamedTuple):
    """A value that the body of an equation hands out."""

    eqn: Any
    value: int


class Body(NamedTuple):
    """The body of a loop or of a rematerialised block, read."""

    reader: "Reader"
    is_loop: bool


class Reader:
    """Reads values of a jaxpr as sums of outer products.

    Attributes:
      jaxpr: without calls.
      consts: its constants.
      shared: the variables that do not depend on the example.
      values: what stands for each number: a variable, a `Made` or an `Inner`.
      avals: shapes and types of values, by number.
      stopped: the equation, for each variable that is no sum of outer products, because of which it is none.
    """

    def __init__(self, closed: Any, shared: Sequence[bool], numbers: Any = None):
        closed = jaxprs.flat(closed)
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self._numbers = itertools.count() if numbers is None else numbers
        self.made = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        self.shared = set(self.jaxpr.constvars)
        self.shared.update(v for v, s in zip(self.jaxpr.invars, shared, strict=True) if s)
        for eqn in self.jaxpr.eqns:
            refs = (isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars))
            if not eqn.effects and self.shared.issuperset(jaxprs.variables(eqn)) and not any(refs):
                self.shared.update(eqn.outvars)
        self.values: dict[int, Any] = {}
        self.avals: dict[int, Any] = {}
        self.stopped: dict[Any, str] = {}
        self._of_variable: dict[Any, int] = {}
        self._bodies: dict[int, Body] = {}
        self._terms: dict[Any, Terms | None] = {}
        self._zero: dict[Any, bool] = {}

    def maker(self, atom: Any) -> Any:
        """The equation that a value is a result of; None for what none makes."""
        return None if isinstance(atom, core.Literal) else self.made.get(atom)

    def value(self, var: Any) -> int:
        """The number of a variable or a constant, which is thereby handed out."""
        if isinstance(var, core.Literal):
            aval: Any = var.aval
            return self.make(lambda: jnp.asarray(var.val, aval.dtype))
        if var not in self._of_variable:
            self._of_variable[var] = self._add(var, var.aval)
        return self._of_variable[var]

    def make(self, function: Callable[..., Any], *arguments: Any) -> int:
        """The number of what a function makes of values, given as variables or by number."""
        shapes = [self.avals[a] if isinstance(a, int) else a.aval for a in arguments]
        return self._add(Made(function, arguments), jax.eval_shape(function, *map(_struct, shapes)))

    def _add(self, value: Any, aval: Any) -> int:
        number = next(self._numbers)
        self.values[number], self.avals[number] = value, aval
        return number

    def reason(self, atom: Any) -> str:
        """The primitive because of which a value is no sum of outer products; "" where none is."""
        return "" if isinstance(atom, core.Literal) else self.stopped.get(atom, "")

    def is_shared(self, atom: Any) -> bool:
        """Whether a value is the same for all examples."""
        return isinstance(atom, core.Literal) or atom in self.shared

    def is_zero(self, atom: Any) -> bool:
        """Whether a value is zero whatever the arguments are, as far as they are finite."""
        if isinstance(atom, core.Literal):
            return bool(np.all(np.asarray(atom.val) == 0))
        if atom not in self._zero:
            self._zero[atom] = self._makes_zero(self.maker(atom))
        return self._zero[atom]

    def _makes_zero(self, eqn: Any) -> bool:
        if eqn is None:
            return False
        name, operands = eqn.primitive.name, eqn.invars
        if name in ("mul", "dot_general"):
            return any(map(self.is_zero, operands))
        if name in ("add", "add_any", "sub", "concatenate", "pad", "stack"):
            return all(map(self.is_zero, operands))
        if name == "scatter-add":  # Of which the second one are indices.
            return all(map(self.is_zero, (operands[0], operands[2])))
        if name == "select_n":
            return all(map(self.is_zero, operands[1:]))
        return name in _ZERO_OF_ZERO and self.is_zero(operands[0])

    def terms(self, atom: Any) -> Terms | None:
        """Outer products whose sum a value is; None where it is no such sum."""
        if self.is_zero(atom):
            return []
        if isinstance(atom, core.Literal):
            return None
        if atom not in self._terms:
            self._terms[atom] = self._read(atom)
        return self._terms[atom]

    def _read(self, var: Any) -> Terms | None:
        if (eqn := self.maker(var)) is None:
            return None
        name, floating = eqn.primitive.name, jnp.issubdtype(var.aval.dtype, jnp.floating)
        found = None
        if floating and name in RULES:
            try:
                found = RULES[name](self, eqn, eqn.outvars.index(var))
            except NoFormError:
                found = None
        if found is None:
            inner = [self.stopped[v] for v in jaxprs.variables(eqn) if v in self.stopped]
            self.stopped[var] = inner[0] if inner and name in _PASSING else name
        return found

    def each(self, atom: Any, function: Callable[[Outer], Outer | None]) -> Terms | None:
        """The terms of an operand, each of them changed; None if any cannot be."""
        found = self.terms(atom)
        if found is None:
            return None
        changed = [function(term) for term in found]
        return None if None in changed else [term for term in changed if term is not None]

    def handed(self, eqn: Any, number: int) -> int:
        """The number here of a value that the body of an equation hands out, stacked by a loop."""
        aval = self.body(eqn).reader.avals[number]
        if self.body(eqn).is_loop:
            aval = jax.ShapeDtypeStruct((eqn.params["length"], *aval.shape), aval.dtype)
        return self._add(Inner(eqn, number), aval)

    def body(self, eqn: Any) -> Body:
        """The body of a loop or of a rematerialised block."""
        if id(eqn) not in self._bodies:
            inner = eqn.params["jaxpr"]
            closed = inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())
            shared = [self.is_shared(v) for v in eqn.invars]
            is_loop = eqn.primitive.name == "scan"
            if (
                is_loop
            ):  # What is carried need not stay what it was, and slices belong to iterations.
                first, last = jaxprs.scan_parts(eqn.params)
                shared[first:last] = [False] * (last - first)
            self._bodies[id(eqn)] = Body(Reader(closed, shared, self._numbers), is_loop)
        return self._bodies[id(eqn)]

    def lifted(self, eqn: Any, term: Outer, stacked: bool) -> Outer:
        """A term of an equation's body as one of the equation's result.

        Of a loop, iterations are positions, or, if the result is `stacked`, entries of its first axis.
        """
        body = self.body(eqn)
        if not body.is_loop:
            return self._lifted_from_block(eqn, term)
        (label,) = labels(1)
        axes = ((label,), *term.axes) if stacked else term.axes
        new = term._replace(axes=axes, sizes=term.sizes | {label: eqn.params["length"]})
        for right, factor in enumerate(term.factors):
            value, varies = self._from_loop(eqn, factor.value)
            lifted = Factor(value, (label, *factor.axes) if varies else factor.axes)
            new = new.with_factor(bool(right), lifted)
        return new.settled(label, stacked, self)

    def _lifted_from_block(self, eqn: Any, term: Outer) -> Outer:
        for right, factor in enumerate(term.factors):
            term = term.with_factor(
                bool(right), factor._replace(value=self._from_block(eqn, factor.value))
            )
        return term

    def _from_block(self, eqn: Any, number: int) -> int:
        reader = self.body(eqn).reader
        var = reader.values[number]
        if isinstance(var, core.Var) and var in reader.jaxpr.invars:
            atom = eqn.invars[reader.jaxpr.invars.index(var)]
            if not isinstance(atom, core.Literal):
                return self.value(atom)
        return self.handed(eqn, number)

    def _from_loop(self, eqn: Any, number: int) -> tuple[int, bool]:
        """The number of a body's value in all iterations, and whether it has an axis for them."""
        reader = self.body(eqn).reader
        var = reader.values[number]
        if isinstance(var, core.Var) and var in reader.jaxpr.invars:
            at = reader.jaxpr.invars.index(var)
            first, last = jaxprs.scan_parts(eqn.params)
            atom = eqn.invars[at]
            if not isinstance(atom, core.Literal) and not first <= at < last:
                return self.value(atom), at >= last
        return self.handed(eqn, number), True

    def count_from_zero(self, carry: Any, result: Any) -> bool:
        """Whether a body only adds to what it carries; if so, it is read as if it began with nothing."""
        var = carry
        while var is not result:
            users = [eqn for eqn in self.jaxpr.eqns if var in eqn.invars]
            if len(users) != 1 or users[0].primitive.name not in ("add", "add_any"):
                return False
            if users[0].invars.count(var) != 1 or var in self.jaxpr.outvars:
                return False
            (var,) = users[0].outvars
        self._zero[carry] = True
        return True

    # Running what was read.

    def needed(self, wanted: Iterable[int]) -> dict[int, set[int]]:
        """For each equation that hands values out, by its id, the numbers of those."""
        found: dict[int, set[int]] = {}
        for number in self._all(wanted):
            value = self.values[number]
            if isinstance(value, Inner):
                found.setdefault(id(value.eqn), set()).add(value.value)
        return found

    def _all(self, wanted: Iterable[int]) -> list[int]:
        """These numbers, and those that they are made of."""
        found: dict[int, None] = {}

        def visit(number: int) -> None:
            value = self.values[number]
            if isinstance(value, Made):
                for each in value.arguments:
                    if isinstance(each, int):
                        visit(each)
            found[number] = None

        for number in wanted:
            visit(number)
        return list(found)

    def known(self, leaves: Sequence[Any]) -> dict[Any, Any]:
        """The variables that parameters alone decide, given these."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env.update(zip(self.jaxpr.invars, leaves, strict=False))
        eqns = [e for e in self.jaxpr.eqns if e.outvars and self.shared.issuperset(e.outvars)]
        jaxprs.run(eqns, env, ())
        return env

    def run(
        self, arguments: Sequence[Any], wanted: Sequence[int], outs: bool = True,
        env: dict | None = None, inline: bool = False,
    ) -> tuple[list, dict[int, Any]]:  # fmt: skip
        """Evaluates the jaxpr: (its results, the wanted values by number).

        Args:
          arguments: for its inputs.
          wanted: numbers of values.
          outs: whether its results are asked for.
          env: variables that are known.
          inline: whether rematerialised blocks are evaluated as if they were none.
        """
        jaxpr, inner, found = self.jaxpr, self.needed(wanted), {}
        env = {} if env is None else dict(env)
        env.update(zip(jaxpr.constvars, self.consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for eqn in self._live(wanted, inner, outs, env):
            values = [read(v) for v in eqn.invars]
            if id(eqn) in inner:
                results, more = self._enter(eqn, values, sorted(inner[id(eqn)]), inline)
                found |= {(id(eqn), n): x for n, x in more.items()}
            else:
                results = self._evaluate(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))
        handed: dict[int, Any] = {}
        for number in self._all(wanted):
            value = self.values[number]
            if isinstance(value, Made):
                given = [handed[a] if isinstance(a, int) else read(a) for a in value.arguments]
                handed[number] = value.function(*given)
            elif isinstance(value, Inner):
                handed[number] = found[id(value.eqn), value.value]
            else:
                handed[number] = read(value)
        results = [read(v) for v in jaxpr.outvars] if outs is True else []
        return results, {n: handed[n] for n in wanted}

    def _evaluate(self, eqn: Any, values: list) -> list:
        if eqn.primitive.name == "conv_general_dilated" and not self.shared.intersection(
            eqn.invars
        ):
            return [convolution.evaluate(eqn, *values)]
        if eqn.primitive.name == "reduce_precision" and _rounds_nothing(eqn):
            return values
        return jaxprs.bind(eqn, values)

    def _live(self, wanted: Any, inner: dict, outs: bool, env: dict) -> list[Any]:
        """The equations that are needed."""
        needed = set(self.jaxpr.outvars) if outs else set()
        needed = {v for v in needed if not isinstance(v, core.Literal)}
        for number in self._all(wanted):
            value = self.values[number]
            if isinstance(value, Made):
                needed.update(a for a in value.arguments if not isinstance(a, int))
            elif not isinstance(value, Inner):
                needed.add(value)
        live = []
        for eqn in reversed(self.jaxpr.eqns):
            unknown = any(v in needed and v not in env for v in eqn.outvars)
            if unknown or id(eqn) in inner or eqn.effects:
                live.append(eqn)
                needed.update(jaxprs.variables(eqn))
        return live[::-1]

    def _enter(self, eqn: Any, values: list, wanted: list[int], inline: bool) -> tuple[list, dict]:
        reader, is_loop = self.body(eqn)
        if not is_loop:

            def block(*arguments: Any) -> tuple:
                return reader.run(arguments, wanted, inline=inline)

            if inline:
                return block(*values)
            closed, shapes = jax.make_jaxpr(block, return_shape=True)(*values)
            consts = closed.consts
            if consts:  # A block has none, but arguments.
                inner = closed.jaxpr
                closed = jax.make_jaxpr(
                    lambda c, v: core.jaxpr_as_fun(core.ClosedJaxpr(inner, c))(*v)
                )(consts, values)
            found = jaxprs.bind(
                eqn.replace(params=eqn.params | {"jaxpr": closed.jaxpr}), [*consts, *values]
            )
            return jax.tree.unflatten(jax.tree.structure(shapes), found)
        first, last = jaxprs.scan_parts(eqn.params)

        def step(carry: Any, xs: Any) -> tuple:
            out, more = reader.run([*values[:first], *carry, *xs], wanted, inline=inline)
            return out[: last - first], (out[last - first :], more)

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, more) = lax.scan(step, values[first:last], values[last:], **options)
        return [*carry, *ys], more


def _rounds_nothing(eqn: Any) -> bool:
    """Whether an equation rounds to the precision that its operand has.

    JAX does so with what a policy of `jax.checkpoint` saves. While both are used, both are held.
    """
    kind = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (kind.nexp, kind.nmant)


# Equations whose result is zero where their first operand is.
_ZERO_OF_ZERO = (
    "broadcast_in_dim", "convert_element_type", "copy", "cumsum", "div", "dynamic_slice", "expand_dims",
    "gather", "neg", "reduce_sum", "reshape", "rev", "slice", "squeeze", "transpose",
)  # fmt: skip

# Equations that hand their operand on: what stops them is what stopped it.
_PASSING = (
    "transpose", "reshape", "convert_element_type", "copy", "squeeze", "expand_dims", "neg", "mul", "slice",
    "pad", "add_any", "scan", *jaxprs.REMAT, *jaxprs.PLAIN,
)  # fmt: skip


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
