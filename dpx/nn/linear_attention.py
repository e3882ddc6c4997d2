"""The linear attention head that NoisyHead trains, as a Flax NNX module."""

import jax
import jax.numpy as jnp
from flax import nnx


class LinearAttentionHead(nnx.Module):
    """The linear attention f(E) = E + W^PV E · EᵀW^KQ E / L (eq. 2.2 of arXiv 2504.16000).

    Its last entry is the prediction. In the paper only the blocks w₂₂^PV and W₁₁^KQ are not zero, and only
    their product matters: the head holds Γ = (w₂₂^PV W₁₁^KQ)ᵀ, with w₂₂^PV = 1. (The paper's text omits the
    transpose, which ŷ = ⟨Γ, Z⟩ with Z = x_{L+1} sᵀ needs.) The head equals `dpx.noisy_head.predict`.

    Attributes:
      gamma: Γ (D, D), a parameter, for example that of a `Fit`. Its dtype is that of the head; outside of
        `jax.enable_x64` a float64 Γ becomes float32.
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
          y: Responses (..., L) of the labelled tokens. A response of the query, as in (..., L+1), is ignored
            and replaced by zero, as in (2.1).

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
        # Only the last entry of E + ... is needed: one row of values times one column of scores.
        attention = jnp.einsum("...ct,cd,...d->...t", embedded, scores, embedded[..., -1])
        update = jnp.einsum("c,...ct,...t->...", values[-1], embedded, attention) / length
        return embedded[..., -1, -1] + update

    def embed(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The matrix E (..., D+1, L+1) of (2.1), with tokens as columns and zero as the query's response."""
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
