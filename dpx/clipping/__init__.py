"""Exact per-example gradient clipping of any JAX model.

`clipped_grad` takes the loss of one example, as any framework writes it, and returns a function of a batch
that sums the clipped gradients of its examples (`clipped`). How it works:

1. The parameters of any framework become a flat list of arrays, of which some are trained (`params`), and
   each belongs to a threshold (`groups`).
2. On a mesh, the rest runs where the examples are, and the sums are added up once (`meshes`).
3. The batch is taken in slices that a cache or a memory holds, with a stand-in for each example that is
   masked or not finite (`batches`).
4. `jax.value_and_grad` of one example's loss (`losses`) is traced once. Whatever in it mixes examples, or
   gives them the same random numbers (`mixing`), is refused or reported (`reports`).
5. The traced program (`jaxprs`) is read backwards from each gradient until that is a sum of products of two
   values (`gradients.reading`), by one rule for each primitive (`gradients.primitives`, `gradients.entries`).
6. A product is kept as its two factors, whose axes have names (`gradients.outer`); convolutions are such
   products too (`gradients.convolution`).
7. Shapes decide which form each gradient has (`gradients.plan`): it is held, or kept as factors, or put
   together from parts, or made again (`gradients.forms`). Each form knows its norm and its sum.
8. The norm of factors comes from inner products of their rows (`gradients.gram`). Their sum is one product of
   matrices for all examples (`gradients.factors`).
9. The program is run for every example, by `jax.vmap`, and hands out what the forms are made of (`passes`);
   products that nobody asks for are dead code. Rematerialised blocks hand out norms alone and are evaluated
   again for the sum, unless a compiler keeps their activations (`xla_cpu`).
10. Norms are rounded up by what any order of summation may lose (`rounding`). With thresholds they give one
    factor for each example and group (`groups`). Slices are added up with what each addition rounds off.

`explain_clipping` says which form each parameter has, and what it costs (`explain`).
"""

from dpx.clipping.clipped import METHODS, ClippedGrad, ClippedGrads, clipped_grad
from dpx.clipping.explain import Explanation, explain_clipping
from dpx.clipping.losses import record_keys
from dpx.clipping.reports import ClippingWarning

__all__ = [
    "METHODS", "ClippedGrad", "ClippedGrads", "ClippingWarning", "Explanation", "clipped_grad",
    "explain_clipping", "record_keys",
]  # fmt: skip
