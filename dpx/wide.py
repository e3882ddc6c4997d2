"""64-bit sums over records, where nothing is traced."""

import contextlib

import jax
from jax.core import Tracer


@contextlib.contextmanager
def wide_sums(*data):
    """What runs inside runs at once and with 64-bit floats by default, if no array of `data` is traced.

    How a sum over n records rounds depends on all of them. In 32 bits one record of weight 1 may move that of
    1e5 by 136, in 64 bits by 1 + n²·2⁻⁵² at most. Under a JAX transformation nothing changes: there the
    default float type holds, and if that is 32-bit the guarantee is one for exact sums.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(data)):
        yield
    else:
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            yield
