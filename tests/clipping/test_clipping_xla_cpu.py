"""What is done for one compiler alone: each trick can be turned off, and changes no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping import xla_cpu

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 20, 48)).astype("f4")
P = {
    "a": jnp.asarray(RNG.normal(size=(48, 48)) / 7, jnp.float32),
    "b": jnp.asarray(RNG.normal(size=(48, 2100)) / 7, jnp.float32),
    "c": jnp.zeros(2100),
    "k": jnp.asarray(RNG.normal(size=(4, 1, 5, 3)), jnp.float32),
    "l": jnp.asarray(RNG.normal(size=(2, 4, 3, 3)), jnp.float32),
}


def loss(p, x):
    """A held gradient, one of large factors, a block under remat, and convolutions with features first."""
    images = jnp.tanh(jax.lax.conv(x[None, None], p["k"], (2, 1), "SAME"))
    images = jax.lax.conv(images, p["l"], (1, 2), "VALID")
    x = jax.checkpoint(lambda x, a: jnp.tanh(x @ a))(x, p["a"])
    return (
        jnp.mean(jax.nn.log_softmax(x @ p["b"] + p["c"])[:, 0])
        + jnp.sum(x**2)
        + jnp.sum(images**2) / 99
    )


@pytest.mark.quick_cases("rows")
@pytest.mark.parametrize(
    "trick", [t for t in sorted(xla_cpu.TRICKS) if t != "kept" or xla_cpu.keeps_blocks()]
)
def test_results_do_not_depend_on_a_trick(monkeypatch, trick):
    monkeypatch.setattr(xla_cpu, "LONG", 10)
    monkeypatch.setattr(xla_cpu, "uses", lambda name: name in xla_cpu.TRICKS)

    def step(p, x, mask):
        found = clipping.clipped_grad(loss, l2_clip_norm=0.5)(p, x, mask=mask)
        return found.grads, found.norms

    mask = np.array([True, False, True])
    jax.clear_caches()
    with_it = jax.jit(step).lower(P, X, mask).as_text()
    monkeypatch.setattr(xla_cpu, "TRICKS", xla_cpu.TRICKS - {trick})
    jax.clear_caches()
    assert jax.jit(step).lower(P, X, mask).as_text() != with_it
    found = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5))(P, X, mask=mask)
    check(found, per_example(loss, P, (X,)), 0.5, mask=mask)
    jax.clear_caches()


@pytest.mark.parametrize(
    ("version", "keeps"),
    [("0.9.1", True), ("0.11.3", True), ("0.12.0", False), ("1.0.0", False)],
)
def test_activations_are_kept_before_one_version(monkeypatch, version, keeps):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(xla_cpu, "uses", lambda name: True)
    assert xla_cpu.keeps_blocks() == keeps


def test_what_holds_on_other_machines(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not any(map(xla_cpu.uses, xla_cpu.TRICKS))
    assert not xla_cpu.keeps_blocks()
