"""Rounding: bounds that hold in whatever order a compiler adds, and sums that keep what they round off.

The model: IEEE arithmetic that rounds to nearest, unit roundoff u (2⁻²⁴ for float32, 2⁻⁵³ for float64), sums
and products of matrices in any order, fused or not. On anything but a CPU u is taken twice as large, because
the matrix units of GPUs truncate what they add up (Fasi et al. 2021, doi 10.7717/peerj-cs.330). Then a sum of
n terms, each of them the result of at most one rounding, errs by at most γ_n = n·u / (1 − n·u) times the sum
of the absolute values of its terms (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1).
What is too small for a normal number may be flushed to zero, in operands and in results: that costs at most
the smallest normal number.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Axes longer than twice this are added up in chunks, so that n in γ_n is small. Shorter chunks would gain
# little, because there are more of them, and make products of matrices slower.
CHUNK = 512


def unit(dtype: Any) -> float:
    """The unit roundoff u."""
    truncates = jax.default_backend() != "cpu"
    return float(jnp.finfo(dtype).eps) / (1 if truncates else 2)


def tiny(dtype: Any) -> float:
    """The smallest normal number."""
    return float(jnp.finfo(dtype).tiny)


def gamma(roundings: int, dtype: Any) -> float:
    """γ_n for n roundings; infinite where there are too many for any bound."""
    share = roundings * unit(dtype)
    return share / (1 - share) if share < 1 else math.inf


def in_products(places: int) -> int:
    """The n of a sum of products over so many places, one factor of which a clip factor multiplies.

    On anything but a CPU that factor may be the sum of two bfloat16 numbers, which is off by 2⁻¹⁸.
    """
    return places + 4 + (0 if jax.default_backend() == "cpu" else 32)


def chunked(size: int) -> int:
    """The n of a sum of `size` products, computed in chunks: one for the product, then the additions."""
    chunks = -(-size // CHUNK)
    return 1 + min(size, CHUNK) + (chunks if chunks > 1 else 0)


def accumulator(dtype: Any) -> Any:
    """The type of sums of such gradients: float32 for narrower ones, as rounding belongs after the noise."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)  # Of eight bits too, which JAX does not promote.
    return jnp.promote_types(dtype, jnp.float32)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """An upper bound on the exact sum of squares of the entries of `x`, exact to γ_n with a small n."""
    dtype = accumulator(x.dtype)
    total, roundings = added_up(jnp.square(x.astype(dtype)))
    # A square that is flushed, or of an operand that is, was below the smallest normal number.
    return (total + 4 * x.size * tiny(dtype)) * (1 + 1.01 * gamma(2 + roundings, dtype))


def added_up(total: jax.Array) -> tuple[jax.Array, int]:
    """The sum of all entries, and the number of roundings on the way to a term.

    Each axis is added up on its own, long ones in chunks: the barriers keep a compiler from merging these
    sums into a single one with a long running total.
    """
    roundings = 0
    # XLA's compiler for CPUs copies an array to move an axis of length one.
    total = total.reshape([n for n in total.shape if n != 1])
    while total.ndim:
        last = total.shape[-1]
        if last > 2 * CHUNK:
            chunks = -(-last // CHUNK)
            padding = [(0, 0)] * (total.ndim - 1) + [(0, chunks * CHUNK - last)]
            total = jnp.pad(total, padding).reshape(*total.shape[:-1], chunks, CHUNK)
            last = CHUNK
        roundings += last
        total = lax.optimization_barrier(jnp.sum(total, axis=-1))
    return total, roundings


def multiplies_in_tf32() -> bool:
    """Whether products of float32 matrices round these to TensorFloat-32 by default."""
    return jax.default_backend() == "gpu"


def to_tf32(x: jax.Array) -> jax.Array:
    """float32 numbers rounded to the 11 bits of TensorFloat-32, so that such a product rounds nothing."""
    return lax.reduce_precision(x, 8, 10)


def settled(tree: Any) -> Any:
    """The same values, computed once, so that norms and sums see the same numbers.

    A compiler may drop a cast to less than float32 and back, in one kernel and not in another, and it may
    drop barriers. So what is narrower than float32 is rounded by an operation of its own, which stays.
    """

    def each(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits >= 32:
            return x
        kind, wide = jnp.finfo(x.dtype), x.astype(jnp.float32)
        kept = lax.reduce_precision(wide, kind.nexp, kind.nmant)
        if kind.minexp > jnp.finfo(jnp.float32).minexp:
            # That flushes the subnormal numbers of float16, which most small cotangents are.
            step = float(kind.smallest_subnormal)
            kept = jnp.where(jnp.abs(wide) < float(kind.tiny), jnp.round(wide / step) * step, kept)
        return kept.astype(x.dtype)

    return jax.tree.map(each, lax.optimization_barrier(tree))


class Sum(NamedTuple):
    """A running sum of trees of arrays whose rounding does not grow with their number.

    A plain sum in float32 errs by more than a clipped gradient once thousands of terms have been added: with
    records in a crafted order, removing one moves it by several thresholds. Here each addition to `high`
    keeps in `low` what it rounds off (TwoSum; Knuth, The Art of Computer Programming 2, §4.2.2), which is
    added at the end (Ogita, Rump and Oishi, Accurate sum and dot product, 2005, Proposition 4.5): the result
    errs by at most u·|exact sum| + γ_n²·(sum of absolute values).
    """

    high: Any
    low: Any

    def add(self, tree: Any) -> "Sum":
        """The sum and one more tree."""
        # Products must not be fused into the addition.
        leaves, structure = jax.tree.flatten(lax.optimization_barrier(tree))
        high, low = map(structure.flatten_up_to, self)
        sums = [a + x for a, x in zip(high, leaves, strict=True)]
        lost = []
        for a, x, rounded, before in zip(high, leaves, sums, low, strict=True):
            taken = rounded - a
            lost.append(before + ((a - (rounded - taken)) + (x - taken)))
        return Sum(structure.unflatten(sums), structure.unflatten(lost))

    def result(self) -> Any:
        """The sum, rounded once."""
        return jax.tree.map(jnp.add, self.high, self.low)
