"""Exactness on unmodified models, against per-example autodiff."""

import clipping_models
import jax
import numpy as np
import pytest

from dpx import clipping
from dpx.clipping import params as clipping_params
from dpx.clipping import plan


def per_example(loss, params, batch):
    """One gradient after another, as jax.grad gives them."""
    flat = clipping_params.flatten(params)
    grad = jax.jit(jax.grad(lambda leaves, *example: loss(flat.rebuild(leaves), *example)))
    rows = [grad(flat.leaves, *jax.tree.map(lambda x: x[i], batch)) for i in range(len(batch[0]))]
    return [np.stack(leaf).astype("f8") for leaf in zip(*rows, strict=True)]


def check(out, gradients, l2_clip, mask=None):
    """Norms, and sums as a whole and leaf by leaf, to 1e-5 relative."""
    norms = np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))
    factors = np.minimum(1, l2_clip / norms) * (1 if mask is None else mask)
    np.testing.assert_allclose(out.norms, norms * (1 if mask is None else mask), rtol=1e-5)
    expected = [np.tensordot(factors, g, 1) for g in gradients]
    whole = np.sqrt(sum((e**2).sum() for e in expected))
    for got, want in zip(jax.tree.leaves(out.grads), expected, strict=True):
        error = np.linalg.norm(np.asarray(got, "f8") - want)
        assert error <= 1e-5 * max(np.linalg.norm(want), 0.01 * whole)


@pytest.mark.parametrize("name", clipping_models.MODELS)
@pytest.mark.parametrize("favor", [0.0, 1.5], ids=["gram", "auto"])
def test_model(monkeypatch, name, favor):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    loss, params, batch = clipping_models.MODELS[name]()
    gradients = per_example(loss, params, batch)
    l2_clip = float(np.median(np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))))
    methods = ["one_pass", "two_pass"] if favor == 0 else ["auto"]
    for method in methods:
        fn = clipping.clipped_grad(loss, l2_clip=l2_clip, method=method)
        check(jax.jit(fn)(params, *batch), gradients, l2_clip)
