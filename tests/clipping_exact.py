"""What tests of clipping share: gradients of one example after another, and what is compared with them."""

import functools

import jax
import numpy as np
import pytest

import dpx
from dpx import clipping
from dpx.clipping import jaxprs, meshes, rounding
from dpx.clipping import params as clipping_params
from dpx.clipping.gradients import plan

# Compiling is most of the time here, and these arrays are tiny.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)

METHODS = [name for name in clipping.METHODS if name != "auto"]  # One of the others.
on_one_cpu = pytest.mark.skipif(not meshes.on_one_cpu(), reason="only on one CPU")

# How much wider bounds on rounding are than on a CPU, where this is 1.
WIDER = rounding.unit("float32") * 2**24

# How a construct is clipped: what `plan.FAVOR_GRADIENT` is, and options. At 0 all that can be is kept as
# factors, at 1e9 nothing.
HOWS = {
    "one_pass": (0.0, {"method": "one_pass"}),
    "two_pass": (0.0, {"method": "two_pass"}),
    "held": (1e9, {"method": "one_pass"}),
    "auto": (1.5, {"microbatch_size": 3}),
}


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype("f4") / 2


def per_example(loss, params, batch):
    """One gradient after another, as jax.grad gives them."""
    flat = clipping_params.flatten(params)
    grad = jit(
        jax.grad(lambda leaves, *example: loss(flat.rebuild(leaves, flat.constants), *example))
    )
    rows = [grad(flat.leaves, *example) for example in zip(*batch, strict=True)]
    return [np.stack(leaf).astype("f8") for leaf in zip(*rows, strict=True)]


def norms_of(gradients):
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


def check(out, gradients, l2_clip_norm, mask=None, slack=1e-4):
    """Norms, which are rounded up, to `slack` on a CPU; sums as a whole and leaf by leaf to 1e-5 relative."""
    slack *= WIDER
    mask = np.ones(len(out.norms)) if mask is None else mask
    norms = norms_of(gradients) * mask
    found = np.asarray(out.norms, "f8")
    assert np.all(found >= norms * (1 - 1e-5))
    assert np.all(found <= norms * (1 + slack))
    factors = np.minimum(1, l2_clip_norm / np.maximum(found, 1e-30)) * mask
    expected = [np.tensordot(factors, g, 1) for g in gradients]
    whole = np.sqrt(sum((e**2).sum() for e in expected))
    for got, want in zip(jax.tree.leaves(out.grads), expected, strict=True):
        error = np.linalg.norm(np.asarray(got, "f8") - want)
        assert error <= 1e-5 * max(np.linalg.norm(want), 0.01 * whole)


def check_groups(out, gradients, clips, mask=None):
    """The same where each of some names has a threshold, `gradients` being a dict of lists by name."""
    for name, clip in clips.items():
        mine = clipping.ClippedGrads(out.grads[name], out.norms[name], out.losses, (clip,))
        check(mine, gradients[name], clip, mask)


def is_exact(loss, params, batch, how="one_pass", slack=1e-4, **options):
    """Whether a construct, clipped at the median of its norms, has the norms and the sum of its gradients."""
    favor, more = HOWS[how]
    gradients = per_example(loss, params, batch)
    clip = float(min(np.median(norms_of(gradients)), 1e6))
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip, **more | options)
    given = (params, *batch)
    if not all(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(params)):
        fn, given = functools.partial(fn, params), batch  # jit takes no functions.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "FAVOR_GRADIENT", favor)
        check(jit(fn)(*given), gradients, clip, slack=slack)


def without_rule(loss, params, batch):
    """The names of the parameters that are held because a primitive has no rule."""
    rows = dpx.explain_clipping(loss, params, *batch).rows
    return {row.path for row in rows if not row.has_rule}


def equations(jaxpr):
    """All of a jaxpr, those inside of others included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs.inside(eqn):
            yield from equations(inner)
