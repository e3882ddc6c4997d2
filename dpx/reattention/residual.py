"""The variance that noisy parameters cause in the residual stream of a transformer, layer by layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.reattention import moments
from dpx.reattention.moments import LARGEST, Moments
from dpx.reattention.noise_std import ParameterNoise


class ResidualNoise(NamedTuple):
    """The variances of each token in the residual stream (..., L, 1) and of the parameters.

    No gradient flows through them. The average variance over a token's coordinates stands for the variance of
    each coordinate. Variances are cut at `LARGEST`, so that they stay finite for any noise.
    """

    stream: jax.Array
    parameters: jax.Array

    @classmethod
    def start(cls, noise_std: ParameterNoise, tokens: jax.Array, dropout_rate: float):
        """The noise of embedded tokens (..., L) plus their positions, after dropout at `dropout_rate`."""
        parameters = _cut(jnp.square(jnp.asarray(noise_std.rest)))
        variance = jnp.square(jnp.asarray(noise_std.embedding))[tokens][..., None] + parameters
        return cls(_cut(variance / (1 - dropout_rate)), parameters)

    def normed(self, layer, x):
        """The variance (..., L, 1) after LayerNorm of the stream x: the average of `moments.layer_norm`."""
        x, width = lax.stop_gradient(x), x.shape[-1]
        spread = jnp.square(x).mean(-1, keepdims=True) - jnp.square(x.mean(-1, keepdims=True))
        spread = jnp.maximum(spread, 0)
        divisor = spread + self.stream * (1 - 1 / width) + layer.epsilon
        signal = spread / divisor
        variance = self.stream / divisor * (1 - (1 + 2 * signal - signal**2) / width)
        scale = jnp.square(lax.stop_gradient(layer.scale[...])).mean() + self.parameters
        return _cut(scale * variance + self.parameters * (signal + 1))

    def dense(self, layer, x, variance):
        """The variance (..., 1) after a dense layer with input x of `variance` (..., 1).

        It is the average of `moments.dense` over the outputs, at the cost of one output: only squares of
        weights matter, so that one column of root mean squares replaces all columns.
        """
        kernel, bias = self._of(layer.kernel), self._of(layer.bias)
        one = jnp.sqrt(jnp.square(kernel.mean).mean(1, keepdims=True))
        x = Moments(lax.stop_gradient(x), variance)
        bias = bias._replace(mean=jnp.zeros(1))
        return _cut(moments.dense(x, kernel._replace(mean=one), bias).var)

    def gelu(self, hidden, variance):
        """The variance (..., 1) after GELU, averaged over the units of a token.

        The units' means are treated as a sample of a Gaussian, and eight points of that Gaussian replace
        hundreds of units: computing all variances would take longer than the activations.
        """
        hidden = lax.stop_gradient(hidden)
        points, weights = np.polynomial.hermite_e.hermegauss(8)
        mean, std = hidden.mean(-1, keepdims=True), hidden.std(-1, keepdims=True)
        units = Moments(mean + std * jnp.float32(points), variance)
        average = moments.gelu_series(units).var * jnp.float32(weights / weights.sum())
        return average.sum(-1, keepdims=True)

    def _of(self, parameter):
        return Moments(lax.stop_gradient(parameter[...]), self.parameters)

    def plus(self, branch, dropout_rate):
        """The noise after a residual branch of variance `branch`, with dropout, was added to the stream."""
        return self._replace(stream=_cut(self.stream + branch / (1 - dropout_rate)))


def _cut(variance):
    return jnp.minimum(variance, LARGEST)
