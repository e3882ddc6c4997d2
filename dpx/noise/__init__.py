"""Additive noise: the one door through which releases go, and the laws of what is added there.

`release` is the only function in this project that adds noise to what is private. It is told the exact value,
how far a record may move it, and the noise per unit of that; `dpx.audit.replay` watches it, and
compares two runs on neighbouring data with what was declared here.

Samples are drawn in finite precision, and the guarantees are those of the real-valued laws; no floating
point sampler escapes that (Mironov, CCS 2012). What is kept small is what an attack could use:

- No tail is cut off (`dpx.noise.tails`): every draw has as many random bits as its tail needs, so nothing is
  to be added to δ, at any ε.
- Statistics in 64 bits get noise in 64 bits, and every release is rounded to a public grid, so that low bits
  say nothing about the exact value.

What remains is that the probability of a grid point is off by rounding, by a factor of about 1 ± 1e-2 at
worst for noise in 32 bits and 1 ± 1e-10 in 64 bits, and that bits come from JAX's generator. One-shot releases
take `secure=True`, under which neither remains: exact integers, and discrete noise.
"""

from dpx.noise.door import release
from dpx.noise.laws import Gaussian, Laplace, Law, TruncatedLaplace
from dpx.noise.tails import normal

__all__ = ["Gaussian", "Laplace", "Law", "TruncatedLaplace", "normal", "release"]
