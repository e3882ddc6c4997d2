"""Floating-point operations and bytes of a private training step beside an ordinary one, from shapes alone.

    python -m experiments.bench.costs
    python -m experiments.bench.costs --shapes=gpt2-small --compile

Both steps (gradients of a batch, Adam) are lowered from abstract arrays and counted by XLA's cost analysis.
Nothing is allocated, and no accelerator is needed. The program that is counted is not fused: its bytes count
every operand of every operation. With --compile the steps are compiled for this machine as well: bytes are
then those of the compiled program, and temporary ones stand beside them.

With --products the multiplications of matrices in both gradients are counted, from their jaxprs as a GPU
would run them, by what they cost on matrix units: in bfloat16 1, in float32 rounded to TensorFloat-32 2, in
full float32 15. That is most of what a GPU's time is spent on, and needs no GPU.

    python -m experiments.bench.costs --products --dtype=bfloat16

The estimate for NVIDIA H100s is a roofline: operations at the dense bfloat16 rate, or parameters, gradients
and both moments of Adam read and written once at the memory's rate, whichever takes longer; on eight, with
the sum of gradients reduced over NVLink. Real steps take two to three times as long.
"""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import dpx
from dpx.clipping import jaxprs
from dpx.training import precision
from experiments.bench._steps import CLIP, clipped_sum, mean_gradient, temp_bytes
from experiments.bench.shapes import Shape, build

FLOPS, BANDWIDTH, NVLINK = 989e12, 3.35e12, 450e9  # an H100 SXM, in operations and bytes a second

_SHAPES = flags.DEFINE_list("shapes", None, "Which shapes; all by default.")
_PRODUCTS = flags.DEFINE_bool("products", False, "Count products by precision, as on a GPU.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", precision.KNOWN, "What losses compute in.")
_COMPILE = flags.DEFINE_boolean("compile", False, "Compile as well, for temporary bytes.")


SHAPES = {
    "recommender": Shape(64, 64, 23_715, 50, last=True),
    "gpt2-small": Shape(8, 768, 50_257, 512, blocks=12, heads=12),
    "135M": Shape(8, 576, 49_152, 512, blocks=30, heads=9),
    "1B": Shape(8, 2048, 32_000, 1024, blocks=20, heads=16),
}


def steps(shape: Shape) -> tuple[dict[str, Callable], tuple]:
    """An ordinary and a private training step, and the shapes of their arguments."""
    loss, params, batch_of = build(shape, abstract=True)
    adam, gradient = optax.adam(1e-3), mean_gradient(loss)
    # XLA counts what is in a loop once, so all examples at once, as an accelerator takes them.
    clipped = clipped_sum(loss, microbatch_size=shape.batch)
    state = jax.eval_shape(adam.init, params)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def ordinary(params: Any, state: Any, key: Any, *batch: jax.Array) -> Any:
        del key
        updates, state = adam.update(gradient(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    def private(params: Any, state: Any, key: Any, *batch: jax.Array) -> Any:
        noise = dpx.privatize(
            l2_clip_norm=CLIP, noise_multiplier=1.0, expected_batch_size=shape.batch, key=key
        )
        noisy, _ = noise.update(clipped(params, *batch), noise.init(params), params)
        updates, state = adam.update(noisy, state, params)
        return optax.apply_updates(params, updates), state

    return {"ordinary": ordinary, "private": private}, (params, state, key, *batch_of(shape.batch))


def products(jaxpr: Any) -> float:
    """Multiplications of matrices in a jaxpr by what they cost: those of a loop as often as it runs.

    A loop whose length is not known is counted once, and of branches the dearest.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [products(each.jaxpr) for each in jaxprs.inside(eqn)]
        if eqn.primitive.name == "dot_general":
            total += _product(eqn)
        elif eqn.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * eqn.params.get("length", 1)
    return total


def _product(eqn: Any) -> float:
    (contract, _), (left, right) = eqn.params["dimension_numbers"], (v.aval for v in eqn.invars)
    count = 2 * eqn.outvars[0].aval.size * math.prod(left.shape[i] for i in contract[0])
    if {left.dtype, right.dtype} == {jnp.dtype(jnp.bfloat16)}:
        return count
    return count * (15 if jaxprs.is_exact(eqn.params) else 2)


def product_ratio(shape: Shape, dtype: str) -> float:
    """The products of the clipped sum of gradients over those of an ordinary gradient, on a GPU."""
    loss, params, batch_of = build(shape, abstract=True)
    loss = precision.computed_in(dtype, loss)
    arguments, steps = (params, *batch_of(shape.batch)), (clipped_sum(loss), mean_gradient(loss))
    jax.clear_caches()
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        private, ordinary = (products(jax.make_jaxpr(step)(*arguments).jaxpr) for step in steps)
    jax.clear_caches()
    return private / ordinary


def main(argv: list[str]) -> None:
    del argv
    if _PRODUCTS.value:
        print("| shape | computed in | products over the ordinary gradient's |\n|---|---|---|")
        for name in _SHAPES.value or SHAPES:
            ratio = product_ratio(SHAPES[name], _DTYPE.value)
            print(f"| {name} | {_DTYPE.value} | {ratio:.2f} |", flush=True)
        return
    columns = "shape, parameters, step, TFLOP, ratio, GB, ratio, H100 ms, 8 × H100 ms"
    columns += ", temporary GiB, ratio" if _COMPILE.value else ""
    print("| " + columns.replace(", ", " | ") + " |")
    print("|---" * len(columns.split(", ")) + "|")
    for name in _SHAPES.value or SHAPES:
        functions, arguments = steps(SHAPES[name])
        count = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))
        counted: dict[str, dict] = {}
        for step, function in functions.items():
            lowered = jax.jit(function, donate_argnums=(0, 1)).lower(*arguments)
            found: Any = lowered.cost_analysis()
            counted[step] = {"flops": found["flops"], "bytes": found["bytes accessed"]}
            if _COMPILE.value:
                compiled: Any = lowered.compile()
                counted[step]["bytes"] = compiled.cost_analysis()["bytes accessed"]
                counted[step]["memory"] = temp_bytes(compiled)
        first = counted["ordinary"]
        for step, found in counted.items():
            ratio = {key: found[key] / first[key] for key in found}
            # Parameters and two moments are read and written, the gradient written and read, in float32.
            least = max(found["flops"] / FLOPS, 8 * 4 * count / BANDWIDTH)
            shared = max(found["flops"] / 8 / FLOPS, 8 * 4 * count / BANDWIDTH)
            shared += 2 * 7 / 8 * 4 * count / NVLINK
            cells = [
                name, f"{count / 1e6:.1f} M", step, f"{found['flops'] / 1e12:.3g}", f"{ratio['flops']:.2f}",
                f"{found['bytes'] / 1e9:.3g}", f"{ratio['bytes']:.2f}", f"{1e3 * least:.2g}",
                f"{1e3 * shared:.2g}",
            ]  # fmt: skip
            if _COMPILE.value:
                cells += [f"{found['memory'] / 2**30:.2g}", f"{ratio['memory']:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    app.run(main)
