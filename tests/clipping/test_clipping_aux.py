"""What a loss returns beside the loss comes back for every example, and changes nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

import dpx
from dpx import clipping

METHODS = [name for name in clipping.METHODS if name != "auto"]  # One of the others.
RNG = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(8, 5)), jnp.float32),
    "v": jnp.asarray(RNG.normal(size=(5, 5)), jnp.float32),
}
X = RNG.normal(size=(7, 3, 8)).astype("f4")


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"])
    logits = hidden @ params["v"]
    # A use of `w` that the loss does not depend on has no gradient.
    aux = {"logits": logits, "right": [logits[:, 0] > 0, 3], "size": jnp.sum(params["w"] ** 2)}
    return jnp.sum(logits**2), aux


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_is_stacked_per_example_and_changes_no_gradient(method, microbatch_size):
    fn = clipping.clipped_grad(
        loss, l2_clip_norm=0.5, method=method, microbatch_size=microbatch_size, has_aux=True
    )
    mask = np.arange(7) != 2
    out = jit(fn)(PARAMS, X, mask=mask)
    check(out, per_example(lambda params, x: loss(params, x)[0], PARAMS, (X,)), 0.5, mask)
    losses, expected = jax.vmap(loss, (None, 0))(PARAMS, X)
    assert jax.tree.structure(out.aux) == jax.tree.structure(expected)
    np.testing.assert_allclose(out.losses, losses * mask, rtol=1e-5)
    for found, wanted in zip(jax.tree.leaves(out.aux), jax.tree.leaves(expected), strict=True):
        wanted = np.array(wanted)
        wanted[2] = 0
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_of_no_examples_and_of_one_that_is_not_finite():
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, has_aux=True)
    empty = jit(fn)(PARAMS, X[:0])
    assert empty.aux["logits"].shape == (0, 3, 5)
    assert empty.aux["right"][0].dtype == bool
    poisoned = X.copy()
    poisoned[1] = np.nan
    out, clean = jit(fn)(PARAMS, poisoned), jit(fn)(PARAMS, X)
    others = np.arange(7) != 1
    assert out.norms[1] == np.inf
    np.testing.assert_allclose(
        out.aux["logits"][others], clean.aux["logits"][others], rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_the_forward_pass_is_made_once():
    params = {"w": [jnp.ones((64, 64))] * 4}

    def deep(params, x):
        for w in params["w"]:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2), x

    def flops(loss, **options):
        fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, **options)
        compiled: Any = jax.jit(fn).lower(params, np.ones((8, 16, 64), "f4")).compile()
        return compiled.cost_analysis()["flops"]

    assert flops(deep, has_aux=True) < 1.01 * flops(lambda params, x: deep(params, x)[0])


@pytest.mark.slow
def test_wrong_results_and_explanations(capsys):
    dpx.explain_clipping(loss, PARAMS, X, has_aux=True)
    assert capsys.readouterr().out
    with pytest.raises(ValueError, match="has_aux=True"):
        clipping.clipped_grad(loss, l2_clip_norm=1.0)(PARAMS, X)
    for wrong, match in (
        (lambda params, x: loss(params, x)[0], "a pair"),
        (lambda params, x: (*loss(params, x), 1), "a pair"),
        (lambda params, x: (x.sum() * params["w"].sum(), {"k": jax.random.key(0)}), r"aux\['k'\]"),
    ):
        with pytest.raises(ValueError, match=match):
            clipping.clipped_grad(wrong, l2_clip_norm=1.0, has_aux=True)(PARAMS, X)
