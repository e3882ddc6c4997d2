"""Symmetric self-attention (Q = K = X) whose weights come from one private release of XXᵀ."""

import jax
import jax.numpy as jnp
from flax import nnx

from dpx import gram
from dpx._validate import check_choice, check_positive
from dpx.gram.attend import KERNELS
from dpx.privacy import Ledger


class Release(nnx.Variable):
    """A released matrix, which is part of a model's state but is not trained."""


class GramAttention(nnx.Module):
    """The attention D(B)⁻¹ f(B) V, where B is a private release of XXᵀ.

    The layer depends on private data through the release alone, so that calling it costs no privacy. The cost
    of the release is in the ledger of the model that the layer belongs to.

    Guarantee: that of the release, if `values` are public or protected by a guarantee of their own.

    Attributes:
      matrix: B, (n, n), in a `Release` variable (`nnx.state(model, Release)`).
      kernel, temperature: As they were given.
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
        """Makes the layer of a release, and enters its cost in the ledger.

        Args:
          release: A result of `dpx.gram.release`.
          ledger: The ledger of the model that this layer belongs to. A release that several layers use is
            entered by one of them (pass `ledger=Ledger()` to the others), since using it again is free.
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
          ValueError: if V does not have n rows.
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
