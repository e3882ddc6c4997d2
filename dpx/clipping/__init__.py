"""Exact per-example gradient clipping of any JAX model.

The front door is `clipped_grad`. It takes the loss of one example, as any framework writes it,
and returns a function of a batch that sums the clipped gradients of its examples. How it works:

1. The parameters of any framework become a flat list of arrays, of which some are trained (`params`), and
   each belongs to a threshold (`groups`).
2. On a mesh, the rest runs where the examples are, and the sums are added up once (`meshes`).
3. The batch is taken in slices that a cache or a memory holds, with a stand-in for each example that is
   masked or not finite (`batches`).
4. `jax.value_and_grad` of one example's loss is traced, once (`losses`).
5. That program is searched for whatever mixes examples (`mixing`) or gives them the same random numbers
   (`randomness`), which is refused, or reported (`reports`).
6. It is read backwards from each gradient, until that is a sum of products of two values: from equation to
   equation (`gradients.reading`), by one function a primitive (`gradients.primitives`).
7. A product is kept as its two factors, whose axes have names (`gradients.outer`); convolutions are such
   products too (`gradients.convolution`).
8. Shapes decide which form each gradient has (`gradients.plan`): it is held, or kept as factors, or put
   together from parts, or made again (`gradients.forms`, `gradients.factors`).
9. The program is run for every example, by `jax.vmap`, and hands out what the forms are made of; the products
   that nobody asks for are dead code (`passes.one`).
10. Rematerialised blocks hand out norms only, but where a compiler keeps their activations (`xla_cpu`).
11. Norms of factors come from inner products of their rows (`gradients.gram`), those of many parameters
   together (`gradients.bundles`).
12. All norms are rounded up by what any order of summation may lose (`rounding`).
13. Norms and thresholds give one factor for each example and group (`groups`).
14. Sums of factors are one product of matrices for all examples (`gradients.products`), and what blocks made
    is made again, now for the sum (`passes.again`).
15. Slices are added up with what each addition rounds off (`rounding`).
"""

from dpx.clipping.clipped import METHODS, ClippedGrad, ClippedGrads, clipped_grad
from dpx.clipping.explain import Explanation, explain_clipping
from dpx.clipping.randomness import record_keys
from dpx.clipping.reports import ClippingWarning

__all__ = [
    "METHODS",
    "ClippedGrad",
    "ClippedGrads",
    "ClippingWarning",
    "Explanation",
    "clipped_grad",
    "explain_clipping",
    "record_keys",
]
