"""Additive noise: the one door through which releases go, and the laws of what is added there.

`release` adds noise to what is private, and `secure.release_whole` does where arithmetic must be exact;
nothing else in this project does. It is told the exact value, how far a record may move it, and the noise
per unit of that; `dpx.audit.replay` watches it, and compares two runs on neighbouring data with what was
declared here.

Samples are drawn in finite precision, and the guarantees are those of the real-valued laws; no floating
point sampler escapes that (Mironov, CCS 2012). What is kept small is what an attack could use:

- No tail is cut off (`dpx.noise.tails`): every draw has as many random bits as its tail needs, so nothing is
  to be added to δ, at any ε.
- Statistics in 64 bits get noise in 64 bits, and every release is rounded to a public grid, so that low bits
  say nothing about the exact value.

What remains: rounding puts the probability of a grid point off by a factor of up to 1 ± 2e-8, in 32 bits of
up to 1 ± 2e-2 (within 8 standard deviations), sums over records round, and bits come from JAX's generator.
None of it is left with `secure=True`, which one-shot releases take: exact integers, discrete noise
(`dpx.noise.secure`).
"""

from dpx.noise import secure
from dpx.noise.door import check_finite, check_size, release, release_sum
from dpx.noise.laws import Gaussian, Laplace, Law, TruncatedLaplace
from dpx.noise.tails import normal

__all__ = [
    "Gaussian",
    "Laplace",
    "Law",
    "TruncatedLaplace",
    "check_finite",
    "check_size",
    "normal",
    "release",
    "release_sum",
    "secure",
]
