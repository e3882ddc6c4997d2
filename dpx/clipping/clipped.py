"""The sum of the clipped gradients of a batch of examples."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp

from dpx._validate import check_integer as _check_integer
from dpx._validate import check_relation as _check_relation
from dpx.clipping import batches as _batches
from dpx.clipping import groups as _groups
from dpx.clipping import losses as _losses
from dpx.clipping import meshes as _meshes
from dpx.clipping import params as _params
from dpx.clipping import passes as _passes
from dpx.clipping import reports as _reports
from dpx.clipping.gradients import plan as _plan
from dpx.clipping.gradients.plan import METHODS
from dpx.clipping.rounding import gamma, unit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedGrads:
    """The clipped gradients of a batch of B examples, as `dpx.privatize` takes them.

    `norms`, `losses` and `aux` are private data that no guarantee covers: nothing is clipped in them, and
    none of them may be released, logged, or kept in the state of a model (such as running statistics) unless
    a mechanism of its own protects it.

    Attributes:
      grads: the sum over examples of clipped gradients, a tree like that of `ClippedGrad.trained`. Parameters
        in bfloat16 or float16 have float32 sums: nothing is rounded before noise is added.
      norms: (B,) l2 norms of the gradients before clipping, rounded up, most often within 0.1 % of the norm
        (`ClippedGrad.sensitivity`); a tree of them, shaped like `l2_clip_norm`, when that is a tree. They are
        infinite where a gradient is not finite. They, the losses and aux are zero where the mask is False.
      losses: (B,) losses.
      clips: the thresholds, in the order of the leaves of `l2_clip_norm`; static under `jax.jit`.
      aux: what the loss of each example returned beside the loss (`has_aux`), stacked along a leading axis of
        B; else None.
    """

    grads: Any
    norms: Any
    losses: jax.Array
    clips: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    aux: Any = None

    @property
    def num_not_finite(self) -> jax.Array:
        """The number of examples that added nothing because their gradient, or its norm, is not finite.

        It depends on private examples: it is for debugging on public ones, and not for logs.
        """
        infinite = [jnp.isinf(norm) for norm in jax.tree.leaves(self.norms)]
        return functools.reduce(jnp.logical_or, infinite).sum()


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """What `clipped_grad` returns; see there."""

    loss_fn: Callable[..., Any]
    l2_clip_norm: Any
    method: str = "auto"
    normalize: bool = False
    microbatch_size: int | None = None
    strict: bool = False
    wrt: Any = None
    has_aux: bool = False

    def __post_init__(self):
        if not callable(self.loss_fn):
            raise ValueError(f"loss_fn={self.loss_fn!r} must be callable.")
        _groups.check_clip(self.l2_clip_norm)
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {sorted(METHODS)}.")
        size = self.microbatch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"microbatch_size={size!r} must be a positive integer, or None.")
        _params.check_wrt(self.wrt)

    def trained(self, params: Any) -> Any:
        """The part of `params` that is differentiated: a tree like `ClippedGrads.grads`, as Optax wants it.

            state = optimizer.init(gradient.trained(params))
            updates, state = optimizer.update(clipped, state, gradient.trained(params))

        The tree has None at leaves that are not differentiated; of an NNX module it is the `nnx.State` of the
        variables that are. So an optimizer has no state, and no noise, for what is frozen. Updates are added
        where they are not None, for instance by `equinox.apply_updates`; an NNX module takes its new
        variables by `nnx.update(module, optax.apply_updates(gradient.trained(module), updates))`.
        """
        return _params.flatten(params, self.wrt).tree

    def sensitivity(self, relation: dp_accounting.NeighboringRelation | str) -> float:
        """l2 sensitivity of `grads` to one example, in units of the gradient.

        With thresholds C_g over disjoint groups of parameters, an example adds a vector of norm at most C =
        sqrt(sum_g C_g²). Adding or removing one moves the sum by at most C, and so does replacing one by a
        null example that adds nothing; replacing it by another moves it by at most 2C. An example whose mask
        is False or whose gradient is not finite adds exactly zero.

        What an example adds is at most C long as computed, rounding included, for crafted inputs too. Proof.
        The clip factor w = min(1, C/N) is made from an upper bound N of ‖g‖. For a held gradient N² is the
        rounded sum of squares times 1 + γ_n, n the number of roundings on the way to any one term; what is
        added is w times the same array, and each product rounds by a relative u. For a gradient kept as
        factors, bounds replace the products that ‖g‖² consists of, and what the sum over an example's own
        positions rounds is added (`dpx.clipping.gradients.gram`). The rounding of N, w and w·g themselves is
        covered by a factor 1 + (G + 24)u, G the number of squared norms that N² is the sum of. The model of
        arithmetic is that of `dpx.clipping.rounding`, with quotients and roots within 4u. Lengths are raised
        by what flushing to zero can hide, and clip factors below 2⁻⁴⁸ are zero.

        Here g is the gradient that the backward pass computed, however far it is from the derivative of the
        loss. On a GPU the factors of a float32 product are first rounded to TensorFloat-32, as the product
        itself would round them, unless the loss asks for more precision: norms and sums are of what is left.
        A block under `jax.checkpoint` may be evaluated again for the sum. Its second gradient differs from
        the first, whose norm was taken, by the rounding of the block's own computation, where the compiler
        orders that differently. No cotangent is scaled, so derivatives by hand need not be linear.

        Raises:
          ValueError: no relation of `dp_accounting`, nor the lower-case name of one.
        """
        relation = _check_relation(relation, "relation")
        moved = 2 if relation is dp_accounting.NeighboringRelation.REPLACE_ONE else 1
        return moved * math.hypot(*_groups.check_clip(self.l2_clip_norm))

    def rounding(self, batch_size: int, params: Any, *batch: Any, devices: int = 1) -> float:
        """ρ, such that the *computed* sum moves by at most C·(1 + ρ) when one example is added or removed.

        Each of both sums is off from the exact sum of what the examples add by at most C·ρ/2, ρ/2 =
        batch_size·(A·γ_n + γ_(8+d) + 3u), d the number of devices. Within one microbatch of m examples n is
        m + 4 and A = 1 where gradients are held; n is about m·P and A = 64 where they are kept as factors
        with P positions (all uses together), because their terms may cancel. The number of microbatches does
        not enter n (`dpx.clipping.rounding.Sum`); that of devices does, whose sums are added up without
        compensation. This bound is for the worst order of summation and the worst data set. It says little
        (ρ > 1) for large batches of long sequences in one piece, and nothing (ρ infinite) of blocks under
        `jax.checkpoint` that are evaluated again for the sum.

        Args:
          batch_size: examples in the whole sum, which may be several calls, added up by such a sum.
          params: the parameters.
          *batch: what one call is given; only shapes matter.
          devices: over which the examples are spread, such as the axis `data` of a mesh.
        """
        devices = _check_integer(devices, "devices")
        size, _ = _batches.checked(batch)
        batch, parameters = _batches.as_jax(batch), _params.flatten(params, self.wrt)
        step = max(1, min(self.microbatch_size or size, size))
        dtype = jnp.result_type(jnp.float32, *parameters.leaves)
        dtype = jnp.float32 if any(p.dtype != dtype for p in parameters.leaves) else dtype
        loss, _ = _losses.functions(self.loss_fn, self.has_aux, parameters)
        forms = _plan.forms(_plan.read(loss, parameters.leaves, batch), self.method)
        share = max(form.rounding(step, dtype) for form in forms)
        return 2 * batch_size * (share + gamma(_batches.BLOCK + devices, dtype) + 3 * unit(dtype))

    def __call__(self, params: Any, *batch: Any, mask: jax.Array | None = None) -> ClippedGrads:
        size, mask = _batches.checked(batch, mask, self.strict)
        parameters = _params.flatten(params, self.wrt)
        _params.check_finite(parameters)
        _reports.report_state(params, self.wrt, self.strict)
        groups = _groups.assign(self.l2_clip_norm, parameters.tree)
        loss_of, aux_of = _losses.functions(self.loss_fn, self.has_aux, parameters)
        report = _reports.of(self.strict, batch, size, parameters)
        batch = _batches.as_jax(batch)

        def run(leaves: list, frozen: Any, batch: tuple, mask: jax.Array) -> tuple[list, list, Any]:
            loss = functools.partial(loss_of, frozen=frozen)
            reader = _plan.read(loss, leaves, batch, self.microbatch_size != 1)
            forms = _plan.forms(reader, self.method)
            clip, example_bytes = _passes.clipping(reader, forms, leaves, batch, groups.members)

            def once(batch: Any, keep: jax.Array) -> tuple[Any, list, Any]:
                losses, squared_norms, weighted_sum = clip(batch)
                norms = _groups.group_norms(groups, squared_norms)
                factors = _groups.clip_factors(groups, norms, keep, self.normalize)
                sums = weighted_sum(factors)
                # The compiler shares the forward pass.
                aux = _passes.over_examples(lambda example: aux_of(leaves, example, frozen), batch)
                return sums, norms, (losses, aux)

            whole = _batches.finite_only(once)
            # Of explicit axes, `run` sees the examples of one device.
            step = (self.microbatch_size or size) * len(mask) // size
            if self.microbatch_size is None and self.method != "vmap":
                step = _batches.chosen(len(mask), example_bytes, leaves)
            sums, *of_examples = _batches.by_microbatches(whole, step, batch, mask)
            if self.normalize:
                units = [_groups.unit_of(groups.clips[i]) for i in groups.members]
                sums = [x * unit for x, unit in zip(sums, units, strict=True)]
            return sums, *of_examples

        # The report is on what is traced here. What is computed here promotes ranks.
        with report, jax.numpy_rank_promotion("allow"):
            if size == 0:
                clipped = _batches.nothing(parameters.leaves, groups, aux_of, batch)
            else:
                given = parameters.leaves, _meshes.on_mesh(parameters.constants), batch, mask
                clipped = _meshes.run(run, loss_of, *given)
        sums, norms, (losses, aux) = clipped
        grads, norms = parameters.gradient_tree(sums), jax.tree.unflatten(groups.structure, norms)
        return ClippedGrads(grads, norms, losses, groups.clips, aux)


def clipped_grad(
    loss_fn: Callable[..., Any],
    *,
    l2_clip_norm: Any,
    method: str = "auto",
    normalize: bool = False,
    microbatch_size: int | None = None,
    strict: bool = False,
    wrt: Any = None,
    has_aux: bool = False,
) -> ClippedGrad:
    """Builds a function that sums the clipped gradients of a batch of examples.

    Example b with gradient g_b adds min(1, C/‖g_b‖)·g_b, or, normalised, C·g_b/(‖g_b‖ + 0.01) (Bu et al.,
    arXiv:2206.07136). An example is whatever one call of `loss_fn` takes, and it is the unit of privacy: a
    user is one example if all of their data is.

        gradient = dpx.clipped_grad(loss_fn, l2_clip_norm=1.0)
        clipped = jax.jit(gradient)(params, inputs, targets, mask=mask)

    Randomness inside the loss, such as dropout, must belong to the record and not to its slot in the batch:
    else a record that joins or leaves moves the sum by many times C. So the batch has a key for each record:

        keys = dpx.clipping.record_keys(secret_key, step, record_indices)  # not jax.random.split(key, B)

    The result goes to `dpx.privatize`, which refuses it where its own threshold is another, and averages it.
    Or its sum, `clipped.grads`, goes to other noise, such as that of `dpx.training.correlated.banded`.

        updates, state = optax.chain(dpx.privatize(...), optax.adam(1e-3)).update(clipped, state, params)

    On several devices the sum, its norms and its losses are those of one device. A batch that is sharded over
    its first axis stays where it is, and the sum is laid out as the parameters are:

    - Automatic axes: as an ordinary step, with the exchange of one example more. The sum is reduced once for
      every microbatch. XLA computes a sharded batch of convolutions of two values of an example wrongly, so
      that here they are products of matrices.
    - Explicit axes: one reduction of the sum. The loss must not name them (`reshard`, `out_sharding`).
      Arrays on the mesh go with the batch, and are not closed over.
    - Inside `jax.shard_map` and `jax.pmap`: the sum is that of the device's own examples. Add the sums up,
      `jax.lax.psum(clipped.grads, "data")`, before `dpx.privatize`. Axes that are left out of `axis_names`
      may shard parameters. A loss that scans weights alone needs `jax.shard_map(..., check_vma=False)`.

    A `microbatch_size` that divides the batch, and is a multiple of the number of its shards, moves no
    examples between devices.

    Args:
      loss_fn: (params, *example) -> scalar loss of ONE example. `params` is a dict, a Linen or Haiku tree, an
        NNX state or module, an Equinox module, any pytree. An example has no batch axis.
      l2_clip_norm: threshold C, from 1e-12 to 1e12; or, to clip groups of parameters on their own, a tree of
        thresholds that is a prefix of the parameters: each bounds the subtree that it stands for.
      method: how norms and sums are computed; all are exact. "auto" keeps from one backward pass, for each
        parameter, its per-example gradients or the factors they are made of, whichever is less. Of parameters
        in blocks under `jax.checkpoint` it keeps norms alone, and evaluates each block once more for its
        sums, which takes the memory of an ordinary step. On a CPU before JAX 0.12, whose compiler keeps their
        activations, it does so of loops only, and "two_pass" of all. "one_pass" keeps what blocks make as
        well. "vmap" holds every per-example gradient, of the whole batch unless `microbatch_size` is given.
      normalize: whether gradients are normalised rather than clipped.
      microbatch_size: how many examples are processed at a time. None chooses: on one CPU as many as its
        cache holds, on one accelerator as many as half of its memory holds, on several devices all. At 1
        nothing is vectorised over examples, so that losses run that `jax.vmap` refuses, such as those with
        `jax.lax.ragged_dot`.
      strict: whether each `dpx.clipping.ClippingWarning` is an error, and so is a parameter of 65,536
        elements or more that is held for want of a rule. Warnings are about a loss that closes over an array
        with as many rows as the batch, that draws the same random numbers for all examples, or that calls
        what is given all examples at once (a `jax.custom_batching.custom_vmap`, or a `jax.pure_callback` that
        is not sequential); and about parameters that no gradient reaches, or that hold the state of a model.
      wrt: which parameters are trained, None for all. The others are constants: they have no gradient, count
        in no norm, and get no noise. It is one of
          - a type of `nnx.Variable`, such as `nnx.LoRAParam`, for NNX modules and states;
          - a function of (path, leaf) that returns a bool. The path is a tuple of names and numbers. A leaf
            is an array, or, of an NNX state or the `nnx.Param`s of a module, an `nnx.Variable`;
          - a tree of bools that is a prefix of the parameters, True where they are trained.
      has_aux: whether the loss returns a pair (loss, aux), aux any tree of arrays, such as logits or a
        metric, which comes back in `ClippedGrads.aux`.

    Returns:
      A callable (params, *batch, mask=None) -> `ClippedGrads`, to be called under `jax.jit`. Arrays in
      `batch` have a leading axis of B examples, B ≥ 0. `mask`, (B,) bool, is True for a real example and
      False for padding, which adds nothing, whatever it holds. An example adds nothing either if its gradient
      or its squared norm is not finite (of norms above 1.8e19 in float32), nor if the squared norm of a
      factor is not; its (micro)batch is then run once more. `.sensitivity(relation)` gives the l2 sensitivity
      of the sum.

    Raises:
      ValueError: for bad arguments, here or on the call: a tree of thresholds that does not match the
        parameters, an optimizer's state among these, parameters that are not finite (where their values are
        known, outside `jax.jit`), batch axes that differ, a loss that is not a floating-point scalar. And for
        a loss whose examples influence each other: by a collective over a named axis such as
        `jax.lax.pmean`; a moving average of examples, as of a BatchNorm in training mode; keys of another
        implementation than `threefry2x32` (but at `microbatch_size=1`); an array of the batch, or a
        `jax.Ref`, that the loss closes over. All but the average are also found in a derivative that somebody
        wrote by hand (`jax.custom_vjp`). What JAX does not see is not found, such as the mean of the batch,
        computed before the loss is called, random numbers of NumPy, or what a function on the host remembers.
    """
    return ClippedGrad(
        loss_fn, l2_clip_norm, method, normalize, microbatch_size, strict, wrt, has_aux
    )
