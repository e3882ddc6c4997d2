"""The noise of private parameters, followed through the residual stream of a transformer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.reattention import moments
from dpx.reattention.moments import LARGEST, Moments
from dpx.reattention.noise_std import ParameterNoise


class ResidualNoise(NamedTuple):
    """Variances of each token in the residual stream (..., L, 1) and of the parameters.

    What the layers do to them is a constant to differentiation. After LayerNorm and residual branches the
    average over a token's coordinates stands for the variance of each. Variances are cut at `LARGEST`, so
    that all stay finite, whatever the noise.
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
        """(..., L, 1) after the LayerNorm of the stream x: the average of `dpx.reattention.layer_norm`."""
        x, width = lax.stop_gradient(x), x.shape[-1]
        spread = jnp.square(x).mean(-1, keepdims=True) - jnp.square(x.mean(-1, keepdims=True))
        spread = jnp.maximum(spread, 0)
        divisor = spread + self.stream * (1 - 1 / width) + layer.epsilon
        signal = spread / divisor
        variance = self.stream / divisor * (1 - (1 + 2 * signal - signal**2) / width)
        scale = jnp.square(lax.stop_gradient(layer.scale[...])).mean() + self.parameters
        return _cut(scale * variance + self.parameters * (signal + 1))

    def dense(self, layer, x, variance):
        """(..., 1) after a dense layer with input x of `variance` (..., 1).

        The average of `dpx.reattention.dense` over the outputs, at the price of one: only squares of weights
        matter, so one column of their root mean squares does.
        """
        kernel, bias = self._of(layer.kernel), self._of(layer.bias)
        one = jnp.sqrt(jnp.square(kernel.mean).mean(1, keepdims=True))
        x = Moments(lax.stop_gradient(x), variance)
        bias = bias._replace(mean=jnp.zeros(1))
        return _cut(moments.dense(x, kernel._replace(mean=one), bias).var)

    def gelu(self, hidden, variance):
        """(..., 1), the average over the units of one token, taken as a sample of a Gaussian.

        Eight points of that Gaussian replace hundreds of units, whose variances would take longer than their
        activations.
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
        """The noise after a residual branch of variance `branch` was dropped out and added to the stream."""
        return self._replace(stream=_cut(self.stream + branch / (1 - dropout_rate)))


def _cut(variance):
    return jnp.minimum(variance, LARGEST)
