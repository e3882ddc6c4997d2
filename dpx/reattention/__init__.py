"""Re-Attention: attention weights that are corrected for the noise of private training in the keys.

Private training leaves more noise in some parameters than in others; the embedding of a rare token, for
example, moves by noise alone. A noisy key has noisy logits. Since E[exp(logit)] = exp(E[logit] +
Var[logit]/2), it gets more attention than it should ("attention distraction"). Ding et al. (arXiv 2405.18194,
Section 4) treat parameters as independent Gaussians, follow mean and variance of every activation through the
network, and correct the weights.
"""

from dpx.reattention.mechanism import (
    attend,
    attention_weights,
)
from dpx.reattention.moments import (
    Moments,
    add,
    attention,
    dense,
    gelu,
    gelu_series,
    layer_norm,
    maximum,
    relu,
    rows,
)
from dpx.reattention.noise_std import (
    ParameterNoise,
    TokenProbabilities,
    effective_noise_std,
    token_probabilities,
    uniform_probabilities,
)
from dpx.reattention.residual import ResidualNoise

__all__ = [
    "Moments",
    "ParameterNoise",
    "ResidualNoise",
    "TokenProbabilities",
    "add",
    "attend",
    "attention",
    "attention_weights",
    "dense",
    "effective_noise_std",
    "gelu",
    "gelu_series",
    "layer_norm",
    "maximum",
    "relu",
    "rows",
    "token_probabilities",
    "uniform_probabilities",
]
