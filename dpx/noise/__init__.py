"""Additive noise: the one function that adds it to releases, and the laws of what it adds.

`release` adds noise to private statistics, and `secure.release_whole` does so where arithmetic must be exact.
Nothing else in this project adds noise. `dpx.audit.replay` watches them and compares two runs on neighbouring
data with what was declared here. The sampled Gram matrix (`dpx.gram.wishart`) is no sum with noise. It is
made of `dpx.noise.coupled` and `dpx.noise.grid`, and watched in the same way.

The guarantees are those of real-valued laws. What the machine draws has a law of its own (Mironov, CCS 2012).
That of normal noise is the real one to within 1e-20 of KL divergence a coordinate (`dpx.noise.lattice`), and
that of Laplace noise, on its grid, within a factor of 1 ± 2e-8. No tail is cut off (`dpx.noise.tails`).

Two gaps remain. Sums over records round, unless they are sums of integers (`sum_sparse`, `dpx.release`). Bits
come from JAX's generator. A release that is made at once closes both gaps with `secure=True`: it sums exact
integers and draws discrete noise (`dpx.noise.secure`). A training with `secure=True` closes the second gap:
it draws the same noise from the bits of a cryptographic stream (`dpx.noise.stream`).
"""

from dpx.noise import secure, stream
from dpx.noise.laws import Gaussian, Laplace, Law, TruncatedLaplace
from dpx.noise.release import check_finite, check_size, release
from dpx.noise.secure import release_integers, sum_sparse

__all__ = [
    "Gaussian",
    "Laplace",
    "Law",
    "TruncatedLaplace",
    "check_finite",
    "check_size",
    "release",
    "release_integers",
    "secure",
    "stream",
    "sum_sparse",
]
