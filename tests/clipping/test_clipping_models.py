"""Exactness on unmodified models, against per-example autodiff."""

import functools

import clipping_models
import jax
import numpy as np
import pytest

from dpx import clipping
from dpx.clipping import meshes, rounding
from dpx.clipping import params as clipping_params
from dpx.clipping.gradients import plan

# Compiling is most of the time here, and these arrays are tiny.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)

on_one_cpu = pytest.mark.skipif(not meshes.on_one_cpu(), reason="only on one CPU")

# How much wider bounds on rounding are than on a CPU, where this is 1.
WIDER = rounding.unit("float32") * 2**24


def per_example(loss, params, batch):
    """One gradient after another, as jax.grad gives them."""
    flat = clipping_params.flatten(params)
    grad = jit(
        jax.grad(lambda leaves, *example: loss(flat.rebuild(leaves, flat.constants), *example))
    )
    rows = [grad(flat.leaves, *example) for example in zip(*batch, strict=True)]
    return [np.stack(leaf).astype("f8") for leaf in zip(*rows, strict=True)]


def check(out, gradients, l2_clip_norm, mask=None, slack=1e-4):
    """Norms, which are rounded up, to `slack` on a CPU; sums as a whole and leaf by leaf to 1e-5 relative."""
    slack *= WIDER
    mask = np.ones(len(out.norms)) if mask is None else mask
    norms = np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients)) * mask
    found = np.asarray(out.norms, "f8")
    assert np.all(found >= norms * (1 - 1e-5))
    assert np.all(found <= norms * (1 + slack))
    factors = np.minimum(1, l2_clip_norm / np.maximum(found, 1e-30)) * mask
    expected = [np.tensordot(factors, g, 1) for g in gradients]
    whole = np.sqrt(sum((e**2).sum() for e in expected))
    for got, want in zip(jax.tree.leaves(out.grads), expected, strict=True):
        error = np.linalg.norm(np.asarray(got, "f8") - want)
        assert error <= 1e-5 * max(np.linalg.norm(want), 0.01 * whole)


def compare(name, methods):
    loss, params, batch = clipping_models.MODELS[name]()
    gradients = per_example(loss, params, batch)
    l2_clip_norm = float(
        np.median(np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients)))
    )
    for method in methods:
        fn = clipping.clipped_grad(loss, l2_clip_norm=l2_clip_norm, method=method)
        # Closed over: jit takes no functions, such as an Equinox module has among its leaves.
        check(jit(functools.partial(fn, params))(*batch), gradients, l2_clip_norm)


# Each is much like another model, or made of two.
SLOW = {"linen scan of remat", "linen untied, RMSNorm, gated", "nnx untied", "linen LSTM, tied"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in clipping_models.MODELS],
)
def test_model(name):
    compare(name, ["one_pass"])


SMALL = ("one layer twice", "tied autoencoder", "haiku MLP")
LARGE = [name for name in clipping_models.MODELS if name not in SMALL]


@pytest.mark.quick_cases("one layer twice")
@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(n, marks=pytest.mark.slow) for n in LARGE)]
)
def test_model_by_gram_matrices(monkeypatch, name):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    compare(name, ["one_pass", "two_pass"])
