"""Symmetric self-attention (Q = K = X) whose weights come from one private release of XXᵀ."""

import jax
import jax.numpy as jnp
from flax import nnx

from dpx import gram
from dpx._validate import check_choice, check_positive
from dpx.gram.attend import KERNELS
from dpx.privacy import Ledger


class Release(nnx.Variable):
    """A released matrix: part of a model's state, but not a parameter to train."""


class GramAttention(nnx.Module):
    """D(B)⁻¹ f(B) V with B a private release of XXᵀ.

    The private data enter through the release alone, so calling the layer, as often as one likes, costs
    nothing more; the cost stands in the ledger of the model that the layer belongs to.

    Guarantee: the release's, for as long as `values` are public or protected on their own.

    Attributes:
      matrix: B, (n, n), in a `Release` variable (`nnx.state(model, Release)`).
      kernel: f, "exp" or "cosh".
      temperature: What B is divided by.
    """

    def __init__(
        self,
        release: gram.GramRelease,
        ledger: Ledger,
        *,
        kernel: str = "exp",
        temperature: float = 1.0,
        label: str = "attention matrix",
    ):
        """Takes the release and enters its cost in the ledger.

        Args:
          release: From `dpx.gram.release`.
          ledger: The ledger of the model that this layer belongs to. A release used by several layers is
            entered once, by the first of them (`ledger=Ledger()` for the others): using it again is free.
          kernel: f, "exp" or "cosh".
          temperature: As in `dpx.gram.attention`.
          label: The name of the ledger's entry.

        Raises:
          ValueError: for an unknown kernel, a temperature that is not positive, or a ledger of another unit
            or neighbouring relation.
        """
        check_choice(kernel, "kernel", KERNELS)
        self.temperature = check_positive(temperature, "temperature")
        ledger.spend(release.guarantee, label)
        self.matrix = Release(release.matrix)
        self.kernel = kernel

    def __call__(self, values: jax.Array | None = None) -> jax.Array:
        """Attends to public values.

        Args:
          values: V, (..., n, Dv), public; None for the attention matrix itself.

        Returns:
          (..., n, Dv), or (n, n).

        Raises:
          ValueError: where V has not n rows.
        """
        weights = gram.attention(self.matrix[...], kernel=self.kernel, temperature=self.temperature)
        if values is None:
            return weights
        values = jnp.asarray(values)
        if values.ndim < 2 or values.shape[-2] != weights.shape[-1]:
            raise ValueError(
                f"values have shape {values.shape}: give (..., {weights.shape[-1]}, Dv), a row for each "
                "row of X"
            )
        return weights @ values
