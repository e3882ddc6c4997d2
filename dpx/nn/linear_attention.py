"""The linear attention head that NoisyHead trains, as a Flax NNX module."""

import jax
import jax.numpy as jnp
from flax import nnx


class LinearAttentionHead(nnx.Module):
    """f(E) = E + W^PV E · EᵀW^KQ E / L (eq. 2.2 of arXiv 2504.16000), predicting its last entry.

    The paper sets every block of W^PV and W^KQ to zero but w₂₂^PV and W₁₁^KQ, of which only the product
    matters: the head holds Γ = (w₂₂^PV W₁₁^KQ)ᵀ and takes w₂₂^PV = 1. (The text prints Γ without the
    transpose; ŷ = ⟨Γ, Z⟩ with Z = x_{L+1} sᵀ needs it.) The head equals `dpx.noisy_head.predict`.

    Attributes:
      gamma: Γ (D, D), a parameter: that of a `Fit`, for example. Its dtype is the head's, and converting a
        float64 Γ outside `jax.enable_x64` makes it float32.
    """

    def __init__(self, gamma: jax.Array):
        gamma = jnp.asarray(gamma)
        if gamma.ndim != 2 or gamma.shape[0] != gamma.shape[1]:
            raise ValueError(f"gamma has shape {gamma.shape}: it must be (D, D)")
        self.gamma = nnx.Param(gamma)

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Predicts the query's response in each prompt.

        Args:
          x: Tokens (..., L+1, D), the query last.
          y: Responses (..., L) of the labelled tokens. A value for the query, (..., L+1), is ignored: (2.1)
            puts zero in its place.

        Returns:
          ŷ_{L+1} (...).

        Raises:
          ValueError: for shapes that do not fit.
        """
        gamma = self.gamma[...]
        embedded = self.embed(jnp.asarray(x, gamma.dtype), jnp.asarray(y, gamma.dtype))
        dim, length = gamma.shape[0], embedded.shape[-1] - 1
        values = jnp.zeros((dim + 1, dim + 1), gamma.dtype).at[-1, -1].set(1)
        scores = jnp.zeros((dim + 1, dim + 1), gamma.dtype).at[:-1, :-1].set(gamma.T)
        # Only the last entry of E + ... is asked for, so one row of values meets one column of scores.
        attention = jnp.einsum("...ct,cd,...d->...t", embedded, scores, embedded[..., -1])
        update = jnp.einsum("c,...ct,...t->...", values[-1], embedded, attention) / length
        return embedded[..., -1, -1] + update

    def embed(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """E (..., D+1, L+1) of (2.1): tokens as columns, the query's response zero."""
        dim = self.gamma[...].shape[0]
        tokens = x.shape[-2] if x.ndim >= 2 else 0
        if (
            tokens < 2
            or x.shape[-1] != dim
            or y.shape not in (x.shape[:-1], (*x.shape[:-2], tokens - 1))
        ):
            raise ValueError(
                f"x {x.shape} and y {y.shape} do not fit: they must be (..., L+1, {dim}) and (..., L)"
            )
        y = jnp.concatenate([y[..., : tokens - 1], jnp.zeros_like(y[..., :1])], axis=-1)
        return jnp.concatenate([jnp.swapaxes(x, -1, -2), y[..., None, :]], axis=-2)
