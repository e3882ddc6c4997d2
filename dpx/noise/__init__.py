"""Additive noise: the one door through which releases go, and the laws of what is added there.

`release` adds noise to private statistics, and `secure.release_whole` does so where arithmetic must be exact.
Nothing else in this project adds noise. Both are told the exact value, how far one record may move it, and
the noise per unit of that distance. `dpx.audit.replay` watches them, and compares two runs on neighbouring
data with what was declared here. A release that is no sum with noise (`dpx.gram.sampling`) is made of
`dpx.noise.coupled` and `dpx.noise.grid`, and watched in the same way.

Samples are drawn in finite precision, whereas the guarantees are those of the real-valued laws; no floating
point sampler escapes that (Mironov, CCS 2012). Two things keep small what an attack could use:

- No tail is cut off (`dpx.noise.tails`). Every draw has as many random bits as its tail needs, so that
  nothing has to be added to δ, whatever ε is.
- Statistics in 64 bits get noise in 64 bits, and every release is rounded to a public grid, so that low bits
  say nothing about the exact value.

Three gaps remain. Rounding changes the probability of a grid point by a factor of up to 1 ± 2e-8, in 32 bits
of up to 1 ± 2e-2 (within 8 standard deviations). Sums over records round, unless they are sums of integers
(`sum_sparse`, `dpx.partial`). Bits come from JAX's generator. None of these gaps is left with `secure=True`,
which releases that are made at once take: it sums exact integers and draws discrete noise
(`dpx.noise.secure`).
"""

from dpx.noise import secure
from dpx.noise.door import (
    check_finite,
    check_size,
    release,
    release_integers,
    sum_sparse,
)
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
    "release_integers",
    "secure",
    "sum_sparse",
]
