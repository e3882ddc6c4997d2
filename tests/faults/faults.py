"""Privacy faults, each a small patch, and the test that has to fail when it is made.

Every one is a fault that somebody could make in good faith. `old` occurs exactly once in its file, so that
a fault whose place has changed is noticed and not skipped.
"""

import re
from typing import NamedTuple


class Fault(NamedTuple):
    """One patch.

    Attributes:
      name: What goes wrong.
      file: Path in the repository.
      old, new: Text that is replaced, and by what.
      test: Node ids of the tests that catch it, apart by spaces.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


REPLAY = "tests/audit/test_replay.py::"
PRICE = REPLAY + "test_the_noise_that_is_drawn_costs_what_is_stated[{}]"
REMOVED = REPLAY + "test_adding_or_removing_a_record_moves_each_release_by_what_it_declares[{}]"
REPLACED = REPLAY + "test_replacing_a_record_moves_each_release_by_what_it_declares[{}]"
LOOP = "tests/audit/test_replay_training.py::"
MOVED = LOOP + "test_a_record_moves_each_step_by_its_clipped_gradient_alone"
COST = LOOP + "test_the_noise_of_all_steps_costs_what_is_stated"
SECRET = LOOP + "test_all_randomness_comes_from_its_own_secret"
LEDGER = (
    "tests/experiments/test_ledgers.py"
    "::test_rows_and_total_cost_what_is_stated_and_held_out_data_nothing[{}]"
)
DOOR = "tests/noise/test_noise.py::test_every_entry_that_is_released_has_noise_of_its_own_of_the_stated_std"

FAULTS = (
    # -----------------------------------------------------------------------------------------------------
    # The door
    Fault(
        "every leaf of a release has the same draw",
        "dpx/noise/leaves.py",
        "pieces = jnp.split(tails.normal(key, (sum(sizes),), dtype), np.cumsum(sizes)[:-1])",
        "pieces = [jnp.resize(tails.normal(key, (sum(sizes),), dtype), size) for size in sizes]",
        DOOR,
    ),
    Fault(
        "one leaf of a release has no noise",
        "dpx/noise/door.py",
        "        check_finite(noisy, label)\n        about",
        "        noisy[1:] = leaves[1:]\n        about",
        DOOR,
    ),
    Fault(
        "all columns of a release share a draw",
        "dpx/noise/door.py",
        "[std * draw for",
        "[std * (draw[..., :1] if draw.ndim > 1 else draw) for",
        DOOR,
    ),
    Fault(
        "the sensitivities of columns are averaged",
        "dpx/noise/door.py",
        "unit = [jnp.asarray(one, wide) for one in unit]",
        "unit = [jnp.mean(jnp.asarray(one, wide)) for one in unit]",
        DOOR,
    ),
    Fault(
        "a std is divided by √2",
        "dpx/noise/door.py",
        "[std * draw for",
        "[std * draw * 0.5**0.5 for",
        DOOR,
    ),
    Fault(
        "normal draws end at 5.4 standard deviations",
        "dpx/noise/tails.py",
        "return _shaped(normal_from_bits(*_bits(key, shape, dtype), dtype), shape)",
        "return jax.random.normal(key, shape, dtype)",
        "tests/noise/test_noise.py::test_draws_lie_beyond_those_of_jax",
    ),
    Fault(
        "the noise is drawn from a fixed key",
        "dpx/noise/door.py",
        "draws = normal_like(key, leaves, wide)",
        "draws = normal_like(jax.random.key(0), leaves, wide)",
        DOOR,
    ),
    Fault(
        "Laplace draws end where their bits do",
        "dpx/noise/tails.py",
        "return missing * _LOG_WORD - jnp.log(uniform)",
        "return -jnp.log(uniform)",
        "tests/noise/test_noise.py"
        "::test_draws_are_quantiles_of_the_probabilities_that_their_bits_stand_for",
    ),
    Fault(
        "words of zeros are not drawn again, and end the tail",
        "dpx/noise/tails.py",
        "return jax.lax.while_loop(lambda state: (state[1] == 0).any(), draw, state)[1:]",
        "return state[1:]",
        "tests/noise/test_noise.py::test_words_of_zeros_are_drawn_again_and_counted",
    ),
    Fault(
        "releases keep the low bits of the exact value",
        "dpx/noise/door.py",
        "_on_grid(leaf + draw, std) for leaf, draw, std in",
        "leaf + draw for leaf, draw, std in",
        "tests/noise/test_noise.py::test_releases_lie_on_the_grid_of_their_noise",
    ),
    Fault(
        "the grid follows the exact value",
        "dpx/noise/door.py",
        "_, exponent = jnp.frexp(std * _GRIDS[noisy.dtype.itemsize])",
        "_, exponent = jnp.frexp(noisy * _GRIDS[noisy.dtype.itemsize])",
        "tests/noise/test_noise.py::test_releases_lie_on_the_grid_of_their_noise",
    ),
    Fault(
        "exact sums forget that contributions are rounded",
        "dpx/noise/secure.py",
        "return steps + math.ceil(rounding(entries))",
        "return steps - math.ceil(rounding(entries))",
        "tests/noise/test_secure.py",
    ),
    Fault(
        "discrete noise has half of its variance",
        "dpx/noise/secure.py",
        "math.sqrt(_EXTRA_VARIANCE)) * (1 + 2.0**-40)",
        "math.sqrt(_EXTRA_VARIANCE)) / math.sqrt(2)",
        "tests/noise/test_secure.py::test_noise_is_a_discrete_gaussian_of_the_declared_size",
    ),
    Fault(
        "contributions beyond the bound enter exact sums",
        "dpx/noise/secure.py",
        "return np.where(right[owners], rounded, 0)",
        "return rounded",
        "tests/noise/test_secure.py::test_a_contribution_beyond_the_bound_counts_as_zero",
    ),
    Fault(
        "the truncated Laplace bound forgets the 2 of 2δ",
        "dpx/noise/laws.py",
        "ratio = math.log1p(math.expm1(epsilon) / (2 * delta))",
        "ratio = math.log1p(math.expm1(epsilon) / (20 * delta))",
        "tests/noise/test_noise.py::test_guarantees "
        "tests/noise/test_noise.py::test_truncated_laplace_covers_a_change_split_over_two_entries",
    ),
    Fault(
        "the variance of Laplace noise is taken for its scale",
        "dpx/noise/laws.py",
        "return cls(scale=sensitivity / epsilon, bound",
        "return cls(scale=sensitivity / epsilon / math.sqrt(2), bound",
        "tests/noise/test_noise.py::test_guarantees",
    ),
    Fault(
        "sums are rounded to 32 bits before the noise",
        "dpx/noise/door.py",
        "return release(key, exact * unit, sensitivity",
        "return release(key, (exact * unit).astype(np.float32), sensitivity",
        PRICE.format("transitions"),
    ),
    Fault(
        "64-bit sums are released in 32 bits",
        "dpx/_numerics.py",
        "with jax.ensure_compile_time_eval(), jax.enable_x64(True):",
        "with jax.ensure_compile_time_eval():",
        PRICE.format("transitions"),
    ),
    # -----------------------------------------------------------------------------------------------------
    # Clipping
    Fault(
        "the cross term of a shared parameter counts once",
        "dpx/clipping/grams.py",
        "total += 2 * added_up(",
        "total += added_up(",
        "tests/clipping/test_clipping_depth.py::test_an_embedding_that_is_looked_up_and_multiplied_is_normed_with_the_rest",
    ),
    Fault(
        "the cross term of a shared parameter is forgotten",
        "dpx/clipping/alike.py",
        "1.0 if i in alone else 2.0",
        "1.0 if i in alone else 0.0",
        "tests/clipping/test_clipping_engine.py::test_tied_embedding_with_repeats_masks_and_one_example",
    ),
    Fault(
        "the sums of a batch without a finite gradient are not zero",
        "dpx/clipping/batches.py",
        "jax.lax.cond(keep.any(), some, none, batch, keep)",
        "jax.lax.cond(keep.any(), some, some, batch, keep)",
        "tests/clipping/test_clipping.py::test_where_no_gradient_is_finite_the_sums_are_zero",
    ),
    Fault(
        "no other example stands in for a short one without a finite gradient",
        "dpx/clipping/batches.py",
        "step(_filled(batch, keep, short=True), keep)",
        "step(batch, keep)",
        "tests/clipping/test_clipping.py::test_non_finite_examples_add_nothing",
    ),
    Fault(
        "no other example stands in for a long one without a finite gradient",
        "dpx/clipping/batches.py",
        "once(_filled(batch, keep, short=False), keep)",
        "once(batch, keep)",
        "tests/clipping/test_clipping.py::test_long_examples_that_are_not_finite_add_nothing",
    ),
    Fault(
        "only the first piece of a long gradient is normed",
        "dpx/clipping/alike.py",
        "np.repeat(which.members, counts)",
        "np.repeat(which.members, np.minimum(counts, 1))",
        "tests/clipping/test_clipping_depth.py::test_gradients_of_different_lengths_are_cut_into_pieces",
    ),
    Fault(
        "parts of a parameter are summed with the clip factors of the first group",
        "dpx/clipping/program.py",
        "sums = done.weighted_sum([weights[k] for k in owners])",
        "sums = done.weighted_sum([weights[0] for k in owners])",
        "tests/clipping/test_clipping_parts.py::test_parts_have_the_threshold_of_their_parameter",
    ),
    Fault(
        "the sums of gradients of convolutions are not clipped",
        "dpx/clipping/engine.py",
        "both = operands, cotangents * weights.reshape(-1, *[1] * (cotangents.ndim - 1))",
        "both = operands, cotangents",
        "tests/clipping/test_clipping_convolutions.py::test_sums_are_made_of_inputs_where_norms_are_of_patches",
    ),
    Fault(
        "parameters whose sums are taken together all get the first ones",
        "dpx/clipping/joint.py",
        "np.arange(e - n // length, e)",
        "np.arange(0, n // length)",
        "tests/clipping/test_clipping_depth.py::test_small_gradients_in_two_types_and_several_groups",
    ),
    Fault(
        "small gradients are summed with the clip factors of another group",
        "dpx/clipping/engine.py",
        "if len({id(weights[k]) for k in joint.members}) == 1:",
        "if joint.members:",
        "tests/clipping/test_clipping_depth.py::test_small_gradients_in_two_types_and_several_groups",
    ),
    Fault(
        "the gradient of a scale inside a weight forgets what both are multiplied by",
        "dpx/clipping/small_values.py",
        "table = fixed_terms.arrange(shared, split, array * term.ratio)",
        "table = fixed_terms.arrange(shared, split, array)",
        "tests/clipping/test_clipping_small_values.py::test_norms_and_sums_are_exact[Gram-scales_of_groups_used_twice]",
    ),
    Fault(
        "a backward pass that is not linear is taken for one that is",
        "dpx/clipping/two_pass.py",
        "if clear and linear.unclear(jaxpr, len(leaves)) is None:",
        "if clear:",
        "tests/clipping/test_clipping_linear.py::test_no_example_adds_more_than_the_threshold",
    ),
    Fault(
        "whatever has a derivative forwards is taken for linear in cotangents",
        "dpx/clipping/linear.py",
        "(*custom.NAMES, *custom.FORWARDS)",
        "custom.NAMES",
        "tests/clipping/test_clipping_linear.py::test_a_derivative_forwards_hides_no_transpose",
    ),
    Fault(
        "a backward pass that adds a constant counts as linear",
        "dpx/clipping/linear.py",
        "if LINEAR in kinds and FIXED in kinds:",
        "if False:",
        "tests/clipping/test_clipping_linear.py::test_what_is_not_linear_takes_one_pass[affine]",
    ),
    Fault(
        "a cotangent that is the same for all entries counts as zero",
        "dpx/clipping/custom.py",
        'return name == "broadcast_in_dim" and is_zero(eqn.invars[0])',
        'return name == "broadcast_in_dim"',
        "tests/clipping/test_clipping_custom.py::test_only_a_cotangent_of_zeros_counts_for_nothing",
    ),
    Fault(
        "the factors of a product with a backward pass of its own are those of its transpose",
        "dpx/clipping/custom.py",
        "axes = [axes[order.index(i)] for i in range(len(order))]",
        "axes = list(axes)",
        "tests/clipping/test_clipping_custom.py::test_norms_and_sums_are_exact[one_pass-once]",
    ),
    Fault(
        "masked examples add their gradients",
        "dpx/clipping/clipped.py",
        "_groups.clip_factors(groups, norms, keep, self.normalize)",
        "_groups.clip_factors(groups, norms, ~keep | keep, self.normalize)",
        "tests/training/test_training.py::test_pieces_sum_to_the_clipped_gradients_over_the_expected_size",
    ),
    Fault(
        "norms are not rounded up",
        "dpx/clipping/rounding.py",
        "return share / (1 - share) if share < 1 else math.inf",
        "return 1e-30",
        "tests/clipping/test_clipping_bound.py::test_no_example_adds_more_than_the_threshold",
    ),
    Fault(
        "narrow activations are not rounded where they are held",
        "dpx/clipping/rounding.py",
        "return jax.tree.map(rounded, lax.optimization_barrier(tree))",
        "return tree",
        "tests/clipping/test_clipping_bound.py::test_narrow_activations_add_no_more_than_the_threshold",
    ),
    Fault(
        "gradients far above the threshold are clipped half",
        "dpx/clipping/groups.py",
        "else jnp.maximum(norm, clip)",
        "else jnp.maximum(jnp.sqrt(norm * clip), clip)",
        MOVED,
    ),
    Fault(
        "every group of parameters gets the whole threshold for free",
        "dpx/clipping/clipped.py",
        "norm = math.hypot(*_groups.check_clip(self.l2_clip_norm))",
        "norm = max(_groups.check_clip(self.l2_clip_norm))",
        "tests/clipping/test_clipping.py::test_groups_are_clipped_on_their_own "
        "tests/clipping/test_clipping.py::test_sensitivity_by_relation "
        "tests/clipping/test_clipping.py::test_sensitivity_is_attained_and_never_exceeded",
    ),
    Fault(
        "replacing a record costs what removing one does",
        "dpx/clipping/clipped.py",
        "return 2 * norm",
        "return norm",
        "tests/clipping/test_clipping.py::test_sensitivity_by_relation",
    ),
    Fault(
        "a sum over pieces is a plain running sum",
        "dpx/clipping/sums.py",
        "lost.append(before + ((a - (rounded - taken)) + (x - taken)))",
        "lost.append(before)",
        "tests/clipping/test_clipping_bound.py::test_a_running_sum_keeps_what_is_rounded_off",
    ),
    Fault(
        "two passes multiply at the default precision",
        "dpx/clipping/two_pass.py",
        '    with jax.default_matmul_precision("highest"):\n        program = trace(',
        "    if True:\n        program = trace(",
        "tests/clipping/test_clipping_bound.py::test_two_passes_multiply_at_the_highest_precision",
    ),
    # -----------------------------------------------------------------------------------------------------
    # Steps and samples
    Fault(
        "samples that are cut off are accounted as whole ones",
        "dpx/training/calibration.py",
        "if max_batch_size is not None:",
        "if False:",
        "tests/training/test_fit.py::test_samples_that_are_cut_off_are_those_that_are_accounted",
    ),
    Fault(
        "the count beside the gradients has no sensitivity",
        "dpx/training/adaptive.py",
        "return 1.0, ratio / 2",
        "return 1.0, 0.0",
        "tests/training/test_adaptive.py::test_gradients_and_count_cost_what_one_mechanism_costs",
    ),
    Fault(
        "a record counts ten times beside its gradient",
        "dpx/training/loop.py",
        "adaptive.counted(result.norms[0], mask, privacy.count_ratio)",
        "10 * adaptive.counted(result.norms[0], mask, privacy.count_ratio)",
        "tests/training/test_adaptive.py::test_a_record_moves_gradients_and_count_by_what_is_declared",
    ),
    Fault(
        "steps with banded noise sample from all groups",
        "dpx/training/sampling.py",
        "chosen = chosen[group[chosen] == step % groups]",
        "",
        "tests/training/test_correlated.py::test_each_step_samples_from_one_group",
    ),
    Fault(
        "blocks of banded noise are longer than its bands",
        "dpx/training/calibration.py",
        "    blocks = math.ceil(steps / bands)",
        "    blocks = math.ceil(steps / bands / 2)",
        "tests/training/test_correlated.py::test_it_costs_what_blocks_of_steps_cost",
    ),
    Fault(
        "columns of the banded matrix are longer than one",
        "dpx/training/correlated.py",
        "return tuple((found / np.linalg.norm(found)).tolist())",
        "return tuple((found / found[0]).tolist())",
        "tests/training/test_correlated.py"
        "::test_the_matrix_has_columns_of_norm_one_that_overlap_within_a_block_only",
    ),
    Fault(
        "the records with the lowest numbers are kept of a sample that is cut off",
        "dpx/training/sampling.py",
        "chosen = np.sort(chosen[np.argpartition(draws[chosen], most)[:most]])",
        "chosen = chosen[:most]",
        "tests/training/test_sampling.py::test_samples_are_cut_off_at_random_and_have_one_shape",
    ),
    Fault(
        "noise is divided by the batch size, as the sum is",
        "dpx/training/transformation.py",
        "noise_multiplier=noise_multiplier,\n            label=label,",
        "noise_multiplier=noise_multiplier / expected_batch_size,\n            label=label,",
        COST,
    ),
    Fault(
        "every step has the same noise",
        "dpx/training/transformation.py",
        "jax.random.fold_in(state.key, state.count),",
        "state.key,",
        MOVED,
    ),
    Fault(
        "only the first group's threshold scales the noise",
        "dpx/training/transformation.py",
        "else math.hypot(*clips)",
        "else clips[0]",
        "tests/training/test_privatize.py::test_noise_has_the_stated_law",
    ),
    Fault(
        "noise is drawn for every piece, of a share of the std",
        "dpx/training/loop.py",
        "return sums.add(grads, result.grads), loss + result.losses.sum()",
        "noise = jax.tree.map(lambda g: privacy.noise_multiplier / 8 * jax.random.normal("
        "jax.random.fold_in(dropout_key, index), g.shape), result.grads)\n"
        "            return sums.add(grads, jax.tree.map(jnp.add, result.grads, noise)), "
        "loss + result.losses.sum()",
        "tests/training/test_training.py::test_noise_enters_once_whatever_the_pieces",
    ),
    Fault(
        "the sum is divided by the realised batch size",
        "dpx/training/loop.py",
        "updates, opt_state = optimizer.update(grads, opt_state, params)",
        "grads = jax.tree.map(lambda g: g * 9.0 / jnp.maximum(mask.sum(), 1), grads)\n"
        "    updates, opt_state = optimizer.update(grads, opt_state, params)",
        MOVED,
    ),
    Fault(
        "dropout masks belong to the slot",
        "dpx/training/loop.py",
        "keys = randomness.record_keys(dropout_key, number, names)",
        "keys = jax.random.split(jax.random.fold_in(dropout_key, index), piece)",
        MOVED,
    ),
    Fault(
        "dropout masks are public",
        "dpx/training/loop.py",
        "dropout = dropout_key, step",
        "dropout = jax.random.key(0), step",
        SECRET,
    ),
    Fault(
        "the noise of training has a fixed key",
        "dpx/training/loop.py",
        '"key": noise_key,',
        '"key": jax.random.key(0),',
        SECRET,
    ),
    Fault(
        "noise and dropout share a key",
        "dpx/training/loop.py",
        "noise_key, dropout_key = jax.random.split(keys.noise)",
        "noise_key = dropout_key = keys.noise",
        MOVED,
    ),
    Fault(
        "sampling follows from the key of the noise",
        "dpx/training/loop.py",
        "seed=keys.sampling,",
        "seed=int(jax.random.key_data(keys.noise)[1]),",
        SECRET,
    ),
    Fault(
        "batches have a fixed size",
        "dpx/training/sampling.py",
        "chosen = np.flatnonzero(draws < sampling_probability)",
        "chosen = np.sort(np.argsort(draws)[: round(num_examples * sampling_probability)])",
        "tests/training/test_sampling.py::test_batch_sizes_follow_the_binomial_law",
    ),
    Fault(
        "large batches are cut off",
        "dpx/training/sampling.py",
        "chosen = np.flatnonzero(draws < sampling_probability)",
        "chosen = np.flatnonzero(draws < sampling_probability)"
        "[: math.ceil(1.1 * num_examples * sampling_probability)]",
        "tests/training/test_sampling.py::test_batch_sizes_follow_the_binomial_law",
    ),
    Fault(
        "an epoch is shuffled and cut into batches",
        "dpx/training/sampling.py",
        "chosen = np.flatnonzero(draws < sampling_probability)",
        "first = step % max(1, round(1 / sampling_probability))\n"
        "        order = np.random.default_rng(root.generate_state(1)).permutation(num_examples)\n"
        "        chosen = np.sort(order[first :: max(1, round(1 / sampling_probability))])",
        "tests/training/test_sampling.py::test_batch_sizes_follow_the_binomial_law "
        "tests/training/test_sampling.py::test_each_example_joins_independently",
    ),
    Fault(
        "the sampling probability is that of a private count",
        "dpx/training/loop.py",
        "num_examples = public_size(layout.rows)",
        "num_examples = layout.rows",
        MOVED,
    ),
    Fault(
        "the steps that are paid for are one less",
        "dpx/training/calibration.py",
        "return found, guarantee(steps)",
        "return found, guarantee(steps - 1)",
        COST,
    ),
    Fault(
        "training is paid for with the ε of the config, whatever was drawn",
        "dpx/training/calibration.py",
        "noise_multiplier=multiplier,\n        spent",
        "noise_multiplier=0.8 * multiplier,\n        spent",
        COST,
    ),
    Fault(
        "checkpoints are made with the noise key",
        "dpx/training/checkpoints.py",
        "return params, (noise.count, *rest)",
        "return params, (noise, *rest)",
        "tests/training/test_training.py::test_checkpoints_hold_no_key",
    ),
    # -----------------------------------------------------------------------------------------------------
    # Accounting
    Fault(
        "privacy losses are rounded down",
        "dpx/privacy/events.py",
        "return float(accountant.compose(event).get_epsilon(delta - pld_rounding(steps)))",
        "return float(accountant.compose(event).get_epsilon(delta - pld_rounding(steps))) - interval",
        "tests/privacy/test_privacy.py::test_ledger_composes_dpsgd_with_gaussians_and_plain "
        "tests/privacy/test_privacy.py::test_an_accountant_never_says_less_than_hypothesis_testing",
    ),
    Fault(
        "μ adds up in place of its square: k releases cost √k too little",
        "dpx/privacy/events.py",
        "return None if mu is None else mu * math.sqrt(event.count)",
        "return mu",
        PRICE.format("NoisyHead"),
    ),
    Fault(
        "only the most expensive of several releases counts",
        "dpx/privacy/events.py",
        "else math.hypot(*mus)",
        "else max(mus)",
        "tests/privacy/test_privacy.py::test_ledger_adds_gaussians_exactly",
    ),
    Fault(
        "compositions are forgotten by the calibration",
        "dpx/privacy/gaussian.py",
        "return math.sqrt(compositions) / mu",
        "return 1 / mu",
        "tests/privacy/test_privacy.py::test_gaussian_compositions",
    ),
    Fault(
        "of plain guarantees the largest δ counts, not the sum",
        "dpx/privacy/ledger.py",
        "plain_delta = math.fsum(spent.delta for spent in plain)",
        "plain_delta = max((spent.delta for spent in plain), default=0.0)",
        "tests/privacy/test_privacy.py::test_plain_guarantees_add_up",
    ),
    Fault(
        "bare events are missing from the ledger",
        "dpx/privacy/ledger.py",
        "                events.append(spent)\n                continue",
        "                continue",
        "tests/privacy/test_privacy.py::test_plain_guarantees_add_up",
    ),
    Fault(
        "a cached calibration is believed",
        "dpx/privacy/_cache.py",
        "if stored is not None and holds(stored):",
        "if stored is not None:",
        "tests/privacy/test_privacy.py::test_a_cached_multiplier_is_checked_before_it_is_used",
    ),
    Fault(
        "what is released beside a training run is forgotten by the calibration",
        "dpx/privacy/dpsgd.py",
        "return run if beside is None else dp_accounting.ComposedDpEvent([beside, run])",
        "return run",
        "tests/privacy/test_privacy.py::test_calibration_beside_another_release_fits_one_budget",
    ),
    # -----------------------------------------------------------------------------------------------------
    # Releases of counts
    Fault(
        "long histories are not rescaled in the popularity",
        "dpx/recommend/popularity.py",
        "weights *= np.minimum(1.0, l2_clip_norm / np.maximum(norms, 1))[users]",
        "weights *= 1.0",
        REMOVED.format("popularity"),
    ),
    Fault(
        "the items that lead are those of the exact popularity",
        "dpx/recommend/popularity.py",
        'items = np.argsort(-counts, kind="stable")[:num_kept]',
        'items = np.argsort(-total.sums[0], kind="stable")[:num_kept]',
        REMOVED.format("item Gram"),
    ),
    Fault(
        "the popularity's share is not deducted from the rest",
        "dpx/recommend/popularity.py",
        "of_rest = noise_multiplier / math.sqrt(1 - budget_fraction)",
        "of_rest = noise_multiplier",
        PRICE.format("transitions"),
    ),
    Fault(
        "the popularity has the whole budget",
        "dpx/recommend/popularity.py",
        "of_popularity = noise_multiplier / math.sqrt(budget_fraction)",
        "of_popularity = noise_multiplier",
        PRICE.format("item Gram"),
    ),
    Fault(
        "every round of transitions has the whole budget",
        "dpx/recommend/transitions.py",
        "std = leading.noise_multiplier * math.sqrt(rounds)",
        "std = leading.noise_multiplier",
        PRICE.format("transitions"),
    ),
    Fault(
        "all rounds of transitions have the same noise",
        "dpx/recommend/rounds.py",
        "jax.random.fold_in(key, number),",
        "jax.random.fold_in(key, 0),",
        REMOVED.format("transitions"),
    ),
    Fault(
        "later rounds of transitions are not divided by their own norm",
        "dpx/recommend/rounds.py",
        "weights /= np.sqrt(np.where(squares > 0, squares, 1))[users]",
        "weights /= np.sqrt(np.where(squares > 0, squares, 1))[users] ** 0.5",
        "tests/recommend/test_transitions.py::test_later_rounds_have_the_same_sensitivity",
    ),
    Fault(
        "pairs that the exact counts find remain",
        "dpx/recommend/rounds.py",
        "found = found & (total > cut * std * np.sqrt(counted))",
        "found = found & (counts.reshape(total.shape) > 0)",
        REMOVED.format("transitions"),
    ),
    Fault(
        "n-grams of long records are not clipped",
        "dpx/ngram.py",
        "weights = np.minimum(1, l2_clip_norm / np.maximum(norms, 1))",
        "weights = np.ones_like(norms)",
        REMOVED.format("3-grams"),
    ),
    Fault(
        "n-grams are smoothed by the exact counts of shorter contexts",
        "dpx/ngram.py",
        "noisy = np.asarray(noisy)",
        "noisy = np.where(np.asarray(noisy) > 1, noisy, counts * l2_clip_norm / 2**30)",
        REMOVED.format("3-grams"),
    ),
    Fault(
        "the exact shares of tokens correct the attention",
        "dpx/reattention/noise_std.py",
        "np.clip(noisy.counts / num_records, 0, 1)",
        "np.clip(popularity.count(histories) / num_records, 0, 1)",
        REMOVED.format("token probabilities"),
    ),
    Fault(
        "token probabilities are divided by the private number of records",
        "dpx/reattention/noise_std.py",
        'num_records = _watch.public(len(histories.items), "the number of records")',
        "num_records = len(histories.items)",
        REMOVED.format("token probabilities"),
    ),
    Fault(
        "a block may count twice",
        "dpx/partial.py",
        "if twice := sorted(one.blocks & other.blocks):",
        "if twice := list[str]():",
        "tests/test_partial.py::test_nothing_counts_twice_and_parts_fit_together",
    ),
    Fault(
        "a block that is lost on the way is not missed",
        "dpx/distributed/releases.py",
        "if lost := sorted(names - total.blocks):",
        "if lost := list[str]():",
        "tests/distributed/test_distributed.py"
        "::test_a_block_that_is_lost_or_comes_twice_ends_the_release",
    ),
    Fault(
        "parts that were summed in different ways are merged",
        "dpx/partial.py",
        "return structure == same and all(map(np.array_equal, ours, theirs))",
        "return structure == same",
        "tests/test_partial.py::test_nothing_counts_twice_and_parts_fit_together",
    ),
    Fault(
        "partial sums can be saved like a release",
        "dpx/_saving.py",
        '"Partial": "dpx.partial",',
        "",
        "tests/test_partial.py::test_partials_are_private",
    ),
    Fault(
        "popularity and Gram matrix have one key",
        "dpx/recommend/item_gram.py",
        "popularity_key, gram_key = noise.secure.split(key, secure)",
        "popularity_key = gram_key = key",
        REMOVED.format("item Gram"),
    ),
    # -----------------------------------------------------------------------------------------------------
    # Gram matrices
    Fault(
        "columns are not projected",
        "dpx/gram/columns.py",
        "columns = into_ball(columns, column_bound, axis=0)",
        "columns = columns * 1.0",
        REMOVED.format("sampled Gram, add or remove"),
    ),
    Fault(
        "columns of a sparse matrix are not projected",
        "dpx/gram/columns.py",
        "columns.data *= np.minimum(scale, column_bound / np.maximum(norm, 1e-30))[owner]",
        "columns.data *= scale[owner]",
        "tests/gram/test_gram.py::test_clipping_is_the_projection_for_every_input",
    ),
    Fault(
        "replacing a column costs what removing one does",
        "dpx/gram/accounting.py",
        "if neighboring is REPLACE_ONE:\n        return",
        "if neighboring is REPLACE_ONE:\n        return column_bound**2 if max_column_change is None else",
        REPLACED.format("Gram, replace"),
    ),
    Fault(
        "one triangle of the Gram matrix is mirrored, with half of its noise",
        "dpx/gram/mechanisms.py",
        "return (noisy + noisy.T) / 2",
        "lower = jnp.tril(noisy, -1) / 2 + jnp.tril(gram, -1) / 2\n"
        "    return lower + lower.T + jnp.diag(jnp.diag(noisy))",
        REPLACED.format("Gram, replace"),
    ),
    Fault(
        "the sampled Gram matrix has twice the samples that are admissible",
        "dpx/gram/mechanisms.py",
        "num_samples = _admissible_samples(epsilon, delta, **terms)",
        "num_samples = 2 * _admissible_samples(epsilon, delta, **terms)",
        PRICE.format("sampled Gram, replace"),
    ),
    Fault(
        "sampling forgets the shift that keeps neighbours close",
        "dpx/gram/mechanisms.py",
        "covariance = gram + floor",
        "covariance = gram + 0.01 * floor",
        REPLACED.format("sampled Gram, replace"),
    ),
    # -----------------------------------------------------------------------------------------------------
    # Cross-attention
    Fault(
        "values in a ball are clipped entry by entry",
        "dpx/cross_attention/domain.py",
        "return into_ball(v, self.value_bound)",
        "return jnp.clip(v, -self.value_bound, self.value_bound)",
        "tests/cross_attention/test_cross_attention_privacy.py"
        "::test_a_release_moves_by_no_more_than_the_sensitivity_whatever_a_row_holds",
    ),
    Fault(
        "the sketch has noise for a row that comes or goes, not one that is replaced",
        "dpx/cross_attention/moments.py",
        "return math.sqrt(heads) * (math.sqrt(2) * steps**2",
        "return math.sqrt(heads) * (steps**2",
        REPLACED.format("sketch"),
    ),
    Fault(
        "a row of the sketch that comes or goes has the noise of half a row",
        "dpx/cross_attention/moments.py",
        "        return math.sqrt(heads) * largest_whole(features, domain)",
        "        return math.sqrt(heads) * largest_whole(features, domain) / 2",
        REMOVED.format("sketch, add or remove"),
    ),
    Fault(
        "the sketch tells a private number of rows",
        "dpx/cross_attention/sketch.py",
        "count = n if domain.public_count else None",
        "count = n",
        "tests/cross_attention/test_cross_attention_privacy.py"
        "::test_a_private_count_is_told_by_the_noisy_mass_alone",
    ),
    Fault(
        "the mass of the zero query is exact where the number of rows is private",
        "dpx/cross_attention/moments.py",
        "if domain.public_count and isinstance(features, PolynomialFeatures):",
        "if isinstance(features, PolynomialFeatures):",
        REMOVED.format("sketch, add or remove"),
    ),
    Fault(
        "values outside the simplex have the noise of labels",
        "dpx/cross_attention/domain.py",
        "            return into_simplex(v, self.value_bound)\n",
        "            return v\n",
        REMOVED.format("sketch, add or remove, simplex"),
    ),
    Fault(
        "every head of the sketch has the whole budget",
        "dpx/cross_attention/moments.py",
        "return math.sqrt(heads) * (math.sqrt(2) * steps**2",
        "return (math.sqrt(2) * steps**2",
        REPLACED.format("cross-attention layer"),
    ),
    Fault(
        "rows of the sketch are not clipped on entering",
        "dpx/cross_attention/domain.py",
        "k = jnp.clip(k, 0, self.key_bound) if box else into_ball(k, self.key_bound)",
        "k = jnp.asarray(k)",
        REPLACED.format("sketch, traced"),
    ),
    Fault(
        "values are not clipped on entering",
        "dpx/cross_attention/domain.py",
        "return k, self.nearest_values(v)",
        "return k, v",
        REPLACED.format("sketch, traced"),
    ),
    Fault(
        "contributions of random features are not rescaled",
        "dpx/cross_attention/moments.py",
        "weights = weights * jnp.minimum(1, largest / jnp.maximum(norms, largest / 2))[:, None]",
        "weights = weights * 1.0",
        "tests/cross_attention/test_cross_attention_privacy.py"
        "::test_random_feature_sensitivity_is_never_exceeded "
        "tests/cross_attention/test_cross_attention_privacy.py"
        "::test_random_features_that_overflow_stay_within_the_sensitivity",
    ),
    Fault(
        "a memory with leading axes has the noise of a matrix",
        "dpx/cross_attention/baselines.py",
        "if np.ndim(array) != 2:",
        "if False:",
        "tests/cross_attention/test_unfit_memories.py::test_the_mean_of_values_has_one_matrix",
    ),
    Fault(
        "a memory is wider than the domain that its noise is for",
        "dpx/cross_attention/domain.py",
        "if widths != [self.dim, self.value_dim]:",
        "if False:",
        "tests/cross_attention/test_unfit_memories.py::test_a_domain_is_that_of_the_memory",
    ),
    Fault(
        "the mean of V has half its sensitivity",
        "dpx/cross_attention/baselines.py",
        "sensitivity=2 * domain.value_norm / n,",
        "sensitivity=domain.value_norm / n,",
        REPLACED.format("mean of V"),
    ),
    Fault(
        "fresh noise pays for one query",
        "dpx/cross_attention/baselines.py",
        "change = math.sqrt(count) * 2 * bounds.value_norm * largest_weight",
        "change = 2 * bounds.value_norm * largest_weight",
        REPLACED.format("fresh noise"),
    ),
    Fault(
        "the memory's key is fixed",
        "dpx/nn/cross_attention.py",
        "released = sketch.build(\n            key,",
        "released = sketch.build(\n            jax.random.key(0),",
        PRICE.format("cross-attention layer"),
    ),
    # -----------------------------------------------------------------------------------------------------
    # Trees
    Fault(
        "the root of a tree is released",
        "dpx/cross_attention/node_sums.py",
        "while len(levels[-1]) > 2:",
        "while len(levels[-1]) > 1:",
        REPLACED.format("DPTreeDistance"),
    ),
    Fault(
        "a tree's noise is that of a record that comes or goes",
        "dpx/cross_attention/distance_trees.py",
        "change = 2 * weight_bound + ",
        "change = weight_bound + ",
        REPLACED.format("DPTreeDistance"),
    ),
    Fault(
        "every level of a Gaussian tree has the whole budget",
        "dpx/cross_attention/node_noise.py",
        "return sensitivity * multiplier * np.sqrt(depth * worst.sum() / worst)",
        "return sensitivity * multiplier * np.sqrt(worst.sum() / worst)",
        "tests/cross_attention/test_tree_sums.py::test_gaussian_noise_spends_exactly_the_budget",
    ),
    Fault(
        "every moment of a truncated Laplace tree has the whole budget",
        "dpx/cross_attention/node_noise.py",
        "count = depth * (power + 1) * len(ranges)",
        "count = depth * len(ranges)",
        PRICE.format("DPTreeHighDim, truncated Laplace"),
    ),
    Fault(
        "every column of a truncated Laplace tree has the whole budget",
        "dpx/cross_attention/structures.py",
        "levels * count * columns * copies)",
        "levels * count * copies)",
        PRICE.format("trees, truncated Laplace"),
    ),
    Fault(
        "every copy of a tree has the whole budget",
        "dpx/cross_attention/structures.py",
        "change *= math.sqrt(copies)",
        "change *= 1",
        REPLACED.format("trees, two copies"),
    ),
    Fault(
        "advanced composition is bought without its slack",
        "dpx/cross_attention/node_noise.py",
        "return advanced * (1 - 1e-9), delta / (2 * count)",
        "return advanced * (1 - 1e-9), delta / count",
        "tests/cross_attention/test_tree_sums.py::test_split_budget_composes_to_the_budget",
    ),
    Fault(
        "all trees have the same noise",
        "dpx/cross_attention/distance_trees.py",
        "return jax.lax.map(one, (jax.random.split(key, count), leaves, nodes))",
        "return jax.lax.map(one, (jnp.stack([key] * count), leaves, nodes))",
        REPLACED.format("DPTreeHighDim"),
    ),
    # -----------------------------------------------------------------------------------------------------
    # NoisyHead
    Fault(
        "features are not projected",
        "dpx/noisy_head/bounds.py",
        "shrink = jnp.minimum(1, hyper.feature_radius / jnp.where(size > 0, size, 1))",
        "shrink = jnp.ones_like(size)",
        REPLACED.format("NoisyHead"),
    ),
    Fault(
        "targets are not clipped",
        "dpx/noisy_head/bounds.py",
        "jnp.clip(jnp.where(usable, target, 0), -hyper.response_clip, hyper.response_clip),",
        "jnp.where(usable, target, 0),",
        REPLACED.format("NoisyHead"),
    ),
    Fault(
        "NoisyHead has half its sensitivity",
        "dpx/noisy_head/bounds.py",
        "return G * (2 * C + R * G) if",
        "return G * (2 * C + R * G) / 2 if",
        "tests/noisy_head/test_noisy_head_sensitivity.py::test_gradient_sensitivity_under_attack",
    ),
    Fault(
        "the parameters of NoisyHead leave the ball",
        "dpx/noisy_head/descent.py",
        "nearest = projections.projection_l2_ball(moved, radius)",
        "nearest = moved",
        "tests/noisy_head/test_noisy_head_privacy.py"
        "::test_every_iterate_lies_in_the_ball_that_the_sensitivity_assumes",
    ),
    Fault(
        "√2 is missing in the joint sensitivity of the second moments",
        "dpx/noisy_head/one_shot.py",
        "return 2 * math.sqrt(2) * G**2, 2 * C * G",
        "return 2 * G**2, 2 * C * G",
        "tests/noisy_head/test_noisy_head_sensitivity.py::test_joint_sensitivity_under_attack",
    ),
    Fault(
        "half of the noise is taken off the second moments",
        "dpx/noisy_head/one_shot.py",
        "    values, vectors = _eigh(pair_symmetric(H.reshape((dim,) * 4)))",
        "    H = (H + exact[0]) / 2\n    values, vectors = _eigh(pair_symmetric(H.reshape((dim,) * 4)))",
        REPLACED.format("NoisyHead, one shot"),
    ),
    Fault(
        "the steps of NoisyHead are paid as one",
        "dpx/noisy_head/accounting.py",
        "multiplier = gaussian_noise_multiplier(epsilon, delta, compositions=steps)",
        "multiplier = gaussian_noise_multiplier(epsilon, delta)",
        PRICE.format("NoisyHead"),
    ),
    Fault(
        "all iterates are released at the price of the last",
        "dpx/noisy_head/descent.py",
        'if trajectory and accounting == "last_iterate":',
        'if trajectory and accounting == "none":',
        "tests/noisy_head/test_noisy_head_privacy.py::test_misuse",
    ),
    # -----------------------------------------------------------------------------------------------------
    # Whole runs
    Fault(
        "the prior is missing from its row's ledger",
        "dpx/training/calibration.py",
        "        if beside is None:\n            return alone(steps)",
        "        if True:\n            return alone(steps)",
        LEDGER.format("text"),
    ),
    Fault(
        "training is calibrated as if nothing were released before it",
        "dpx/training/calibration.py",
        "steps=blocks, beside=event, **settings)",
        "steps=blocks, **settings)",
        "tests/training/test_training.py::test_budget_includes_what_was_released_before",
    ),
    Fault(
        "the prior is missing from the total",
        "experiments/dp_transformer/language_model.py",
        'once = {} if prior is None else {"prior": prior.guarantee}',
        "once = {}",
        LEDGER.format("text"),
    ),
    Fault(
        "two rows of a text run share their noise",
        "experiments/dp_transformer/language_model.py",
        "own_keys = (noise.first_row, noise.second_row)",
        "own_keys = (noise.first_row, noise.first_row)",
        LEDGER.format("text"),
    ),
    Fault(
        "two rows of a text run share their samples",
        "experiments/dp_transformer/language_model.py",
        "*samplings, plain_sampling = (keys.sampling, *keys.sampling.spawn(2))",
        "*samplings, plain_sampling = (keys.sampling,) * 3",
        LEDGER.format("text"),
    ),
    Fault(
        "all n-grams have the same noise",
        "experiments/dp_transformer/language_model.py",
        "for order, key in zip(config.ngrams, noise.ngrams, strict=True):",
        "for order, key in zip(config.ngrams, [noise.prior] * len(noise.ngrams), strict=True):",
        LEDGER.format("text"),
    ),
    Fault(
        "test records are trained on",
        "experiments/dp_transformer/language_model.py",
        "    train = corpus.train\n    params = training.train(",
        "    train = corpus.train.of(np.concatenate([corpus.train.tokens, corpus.test.tokens]))\n"
        "    params = training.train(",
        LEDGER.format("text"),
    ),
    Fault(
        "the last item of every user is trained on",
        "experiments/dp_transformer/histories.py",
        "train = known if config.data.train_on_validation else split.train",
        "train = load(config)",
        LEDGER.format("recommender"),
    ),
    Fault(
        "token probabilities are missing from the ledger",
        "experiments/dp_transformer/models.py",
        'ledger = dpx.Ledger().spend(prior, "prior release").spend(beside, label)',
        'ledger = dpx.Ledger().spend(prior, "prior release")',
        LEDGER.format("recommender"),
    ),
    Fault(
        "the prior of a recommender is missing from its row's ledger",
        "experiments/dp_transformer/recommender_rows.py",
        "        prior=prior,\n        correction_key",
        "        prior=None,\n        correction_key",
        LEDGER.format("recommender"),
    ),
    Fault(
        "the plain baseline shares samples with a private row",
        "experiments/dp_transformer/recommender.py",
        "samplings = recommender_rows.Samplings(own, *own.spawn(2))",
        "samplings = recommender_rows.Samplings(own, *own.spawn(1), own)",
        LEDGER.format("recommender"),
    ),
    Fault(
        "the model without privacy gives a private row its output bias",
        "experiments/dp_transformer/recommender.py",
        "bias, start, prior = recommender_rows.prior(config, prepared.train, noise.prior)\n",
        "_, start, prior = recommender_rows.prior(config, prepared.train, noise.prior)\n"
        "        bias = exact\n",
        LEDGER.format("recommender"),
    ),
    Fault(
        "the warm start's share is not deducted",
        "experiments/dp_transformer/recommender_rows.py",
        "        prior=prior,\n        correction_key",
        "        prior=None if model.start else prior,\n        correction_key",
        LEDGER.format("recommender, warm"),
    ),
    Fault(
        "the warm start spends the whole budget",
        "experiments/dp_transformer/warm_start.py",
        "dpx.gaussian_noise_multiplier(config.epsilon, config.delta) / math.sqrt(\n        "
        "budget_fraction\n    )\n    spent",
        "dpx.gaussian_noise_multiplier(config.epsilon, config.delta)\n    spent",
        "tests/experiments/test_warm_start.py::test_release_and_training_cost_the_budget_together",
    ),
    Fault(
        "the warm start and the release of transitions have one key",
        "experiments/dp_transformer/recommender_rows.py",
        "config, key = repetition.config, repetition.noise.transitions",
        "config, key = repetition.config, repetition.noise.prior",
        LEDGER.format("recommender, warm"),
    ),
    Fault(
        "the total is that of the first release",
        "dpx/launch/run.py",
        "        ledger.spend(spent, label)\n    plain",
        "        if not ledger.releases:\n            ledger.spend(spent, label)\n    plain",
        LEDGER.format("text"),
    ),
    Fault(
        "the headline states the ε of the config",
        "dpx/launch/run.py",
        "about = headline.to_json()",
        'about = {**headline.to_json(), "epsilon": config["epsilon"]}',
        LEDGER.format("text"),
    ),
    # -----------------------------------------------------------------------------------------------------
    # Keys and folders
    Fault(
        "noise and sampling come from one key",
        "dpx/training/keys.py",
        "return Keys(_wrap(noise.generate_state(_key_words(), np.uint32)), sampling)",
        "return Keys(_wrap(noise.generate_state(_key_words(), np.uint32)), noise)",
        LEDGER.format("text"),
    ),
    Fault(
        "noise comes from the public seed",
        "dpx/training/keys.py",
        "return _from_seed(config.noise_seed)",
        "return _from_seed(config.seed)",
        LEDGER.format("recommender, warm"),
    ),
    Fault(
        "two processes on one folder draw two keys",
        "dpx/_lease.py",
        "os.link(partial, path)",
        "os.replace(partial, path)\n        open(partial, 'w').close()",
        "tests/launch/test_world_faults.py::test_of_two_runs_on_one_fresh_folder_both_have_one_key",
    ),
    Fault(
        "a run is not locked",
        "dpx/launch/run.py",
        "    with storage.lock(workdir) as still_mine:\n        if not _processes",
        "    if still_mine := lambda: None:\n        if not _processes",
        "tests/launch/test_experiments.py::test_a_folder_that_is_in_use_is_not_run_in",
    ),
    Fault(
        "a run resumes on other data with the same noise",
        "dpx/training/resuming.py",
        'if stored.get("data") != data:',
        "if False:",
        "tests/launch/test_experiments.py::test_keys_belong_to_the_data_that_they_were_made_for",
    ),
    Fault(
        "a run in several processes resumes where one has other data",
        "dpx/training/resuming.py",
        "if any(other != own for other in _processes.of_each(own)):",
        "if False:",
        "tests/training/test_resuming.py::test_data_that_another_process_has_otherwise_are_refused",
    ),
    Fault(
        "a process trains with other settings than those of the guarantee",
        "dpx/training/fitting.py",
        "_processes.check_same(settings | every)",
        "pass",
        "tests/training/test_resuming.py"
        "::test_processes_with_other_arguments_are_refused_before_anything_is_kept",
    ),
    Fault(
        "a training under a run's keys returns the result of other settings",
        "dpx/training/keys.py",
        "_processes.of_first(lambda: resuming.check_training(workdir, found, settings))",
        "pass",
        "tests/training/test_resuming.py::test_under_a_runs_keys_a_result_is_that_of_its_own_arguments",
    ),
    Fault(
        "a finished training whose result is gone trains again",
        "dpx/training/loop.py",
        "if finished and start != steps:",
        "if False:",
        "tests/training/test_resuming.py::test_a_finished_training_does_not_train_again",
    ),
    Fault(
        "a training goes on with another loss or optimizer, and the same noise",
        "dpx/training/fitting.py",
        "        settings |= computed\n",
        "",
        "tests/training/test_programs.py::test_another_loss_or_optimizer_does_not_go_on",
    ),
    Fault(
        "arrays that a loss closes over are no part of it when a training goes on",
        "dpx/training/programs.py",
        "[np.frombuffer(text.encode(), np.uint8), *arrays]",
        "[np.frombuffer(text.encode(), np.uint8)]",
        "tests/training/test_programs.py::test_a_loss_is_told_from_one_that_differs_in",
    ),
    Fault(
        "a guarantee does not say that sums have 32 bits",
        "dpx/_numerics.py",
        "return (_ROUNDED,) if",
        "return () if",
        "tests/test_rounded_sums.py::test_sums_of_32_bits_are_an_assumption[sketch]",
    ),
    Fault(
        "what lies under a mask is summed",
        "dpx/_validate.py",
        "    if any(isinstance(part, np.ma.MaskedArray) for part in parts):\n",
        "    if False:\n",
        "tests/test_real_arrays.py::test_an_array_of_anything_but_real_numbers_is_named[K-masked]",
    ),
    Fault(
        "a memory resumes on other public documents with the same noise",
        "experiments/cross_attention/next_tokens.py",
        "begun = (*private, *later.take(known), tuned_text.model_file(config))",
        "begun = (*private, tuned_text.model_file(config))",
        "tests/experiments/test_public_files.py::test_a_memory_follows_from_public_documents",
    ),
    Fault(
        "a run that lost its keys draws new ones",
        "dpx/training/resuming.py",
        "if names.difference(_BEFORE) if settings is None else names.intersection(_TRAINED):",
        "if False:",
        "tests/launch/test_experiments.py::test_new_keys_are_not_made_for_a_run_that_has_begun",
    ),
    Fault(
        "a run that lost its keys releases once more what is no model",
        "dpx/training/resuming.py",
        "if names.difference(_BEFORE) if settings is None else names.intersection(_TRAINED):",
        "if names.intersection(_TRAINED):",
        "tests/launch/test_experiments.py::test_new_keys_are_not_made_for_a_run_that_has_begun",
    ),
    Fault(
        "runs that name one file from two folders are not added up",
        "dpx/launch/report.py",
        "os.path.join(record.folder, str(path))",
        "str(path)",
        "tests/launch/test_report.py::test_runs_on_one_file_are_added_up_however_they_read_it",
    ),
    Fault(
        "the keys of a finished run are kept",
        "dpx/training/keys.py",
        "            shutil.rmtree(folder)\n",
        "            pass\n",
        "tests/launch/test_experiments.py::test_keys_are_fresh_from_the_system_and_kept_until_discarded",
    ),
    Fault(
        "keys can be read by others",
        "dpx/_storage.py",
        "own = found.st_uid == os.geteuid() and not found.st_mode & 0o077",
        "own = True",
        "tests/launch/test_world_faults.py::test_links_and_open_folders_are_not_taken_for_secrets",
    ),
    Fault(
        "all points of a sweep have the same noise",
        "dpx/launch/sweep.py",
        "if len(found) > 1 and config.noise_seed is not None:",
        "if False:",
        "tests/launch/test_sources.py::test_a_sweep_has_no_noise_seed",
    ),
    Fault(
        "a run that reads less of a file is not in the total over it",
        "dpx/launch/report.py",
        "os.path.realpath(str(path))",
        "json.dumps(data)",
        "tests/launch/test_report.py::test_runs_on_one_file_are_added_up_however_they_read_it",
    ),
    Fault(
        "runs of two ε count as seeds of one",
        "dpx/launch/records.py",
        "config = json.dumps([record.source, others], sort_keys=True)",
        'config = record.title(skip="seed")',
        "tests/launch/test_report.py::test_runs_that_differ_in_more_than_the_seed_are_no_seeds",
    ),
    Fault(
        "a character that is no newline makes records of one person's line",
        "dpx/data/text.py",
        're.split("\\r?\\n", text)',
        "text.splitlines()",
        "tests/data/test_text.py::test_one_row_is_one_record_and_a_newline_alone_ends_a_line",
    ),
    Fault(
        "a character that is no newline makes records of one person's row",
        "dpx/data/files.py",
        'io.StringIO(text, newline="")',
        "text.splitlines(keepends=True)",
        "tests/data/test_text.py::test_one_row_is_one_record_and_a_newline_alone_ends_a_line "
        "tests/data/test_arrays.py::test_one_row_of_a_table_is_one_record",
    ),
    Fault(
        "a separator in an item moves a row to another user",
        "dpx/data/files.py",
        "if any(cell.strip() for cell in cells[width:]):",
        "if False:",
        "tests/data/test_tables.py::test_a_table_that_cannot_be_used_is_named",
    ),
    Fault(
        "a quote that is not closed takes in the rows of others",
        "dpx/data/files.py",
        "delimiter=delimiter, strict=True",
        "delimiter=delimiter",
        "tests/data/test_tables.py::test_a_table_that_cannot_be_used_is_named",
    ),
    Fault(
        "config.json shows the noise seed",
        "dpx/launch/records.py",
        'return {**values, "noise_seed": keys.fingerprint(values["noise_seed"], workdir, new=new)}',
        "return values",
        LEDGER.format("recommender, warm"),
    ),
    # -----------------------------------------------------------------------------------------------------
    # Selections
    Fault(
        "a selection costs what its first candidate does",
        "dpx/privacy/selection.py",
        "worst = np.max(list(curves.values()), axis=0)",
        "worst = next(iter(curves.values()))",
        "tests/privacy/test_selection.py::test_the_largest_divergence_counts_at_every_order "
        "tests/launch/test_sweep_selection.py::test_every_candidate_is_in_the_price_drawn_or_not",
    ),
    Fault(
        "of two candidates the largest ε counts, not the largest divergences",
        "dpx/privacy/selection.py",
        "epsilon=epsilon(whole),",
        "epsilon=max(epsilon(selected_rdp(orders, c, trials)) for c in curves.values()),",
        "tests/privacy/test_selection.py::test_the_largest_divergence_counts_at_every_order",
    ),
    Fault(
        "a selection is priced for a law of fewer trials",
        "dpx/privacy/selection.py",
        "found = rdp + least + 2 * np.min(",
        "found = rdp + least + np.min(",
        "tests/privacy/test_selection.py::test_agrees_with_dp_accounting",
    ),
    Fault(
        "the number of trials is its mean",
        "dpx/privacy/selection.py",
        "return int(generator.poisson(self.mean))",
        "return round(self.mean)",
        "tests/privacy/test_selection.py::test_numbers_of_trials_follow_their_law",
    ),
    Fault(
        "the scores of trials have no noise",
        "dpx/launch/selection.py",
        "noise_multiplier=asked.score_noise,",
        "noise_multiplier=0.0,",
        "tests/launch/test_sweep_selection.py::test_a_score_has_the_noise_that_is_paid_for",
    ),
    Fault(
        "the scores of all trials have the same noise",
        "dpx/launch/selection.py",
        "jax.random.fold_in(key, trial)",
        "key",
        "tests/launch/test_sweep_selection.py::test_every_score_has_noise_of_its_own",
    ),
    Fault(
        "a selection runs its grid from end to end",
        "dpx/launch/selection.py",
        "generator.integers(len(asked.grid), size=count)",
        "generator.permutation(np.resize(np.arange(len(asked.grid)), count))",
        "tests/launch/test_sweep_selection.py::test_points_are_drawn_uniformly_and_with_replacement",
    ),
    Fault(
        "a selection that was killed draws its trials again",
        "dpx/launch/selection.py",
        "if not path.exists():",
        "if drawn.unlink(missing_ok=True) is None:",
        "tests/launch/test_sweep_selection.py::test_private_draws_are_made_once",
    ),
    Fault(
        "what a dear selection has drawn is given away at the price of a cheap one",
        "dpx/launch/selection.py",
        'if storage.read_private(drawn).get("plan") != _digest(asked):',
        "if False:",
        "tests/launch/test_sweep_selection.py"
        "::test_what_was_drawn_for_one_selection_serves_no_other",
    ),
    Fault(
        "a run that costs more than was planned is selected",
        "dpx/launch/selection.py",
        "if spent != str(candidate.guarantee.event):",
        "if False:",
        "tests/launch/test_sweep_selection.py"
        "::test_a_run_that_costs_something_else_than_was_planned_is_not_selected",
    ),
    Fault(
        "a score that is not a number counts for more than the first rank",
        "dpx/recommend/metrics.py",
        "jnp.where(jnp.isnan(own[:, 0]), jnp.inf, 0.5 + counts.sum(axis=1))",
        "0.5 + counts.sum(axis=1)",
        "tests/experiments/test_candidates.py::test_no_user_moves_a_metric_by_more_than_is_declared",
    ),
    Fault(
        "a cotangent over another one counts as linear",
        "dpx/clipping/linear.py",
        'if name == "div" and others != [LINEAR]:',
        'if name == "div":',
        "tests/clipping/test_clipping_linear.py::test_what_is_not_linear_takes_one_pass"
        "[quotient of cotangents]",
    ),
    Fault(
        "what a loop makes of a cotangent later is not looked at",
        "dpx/clipping/linear.py",
        "if after == carry:",
        "if len(after) == len(carry):",
        "tests/clipping/test_clipping_linear.py::test_what_is_not_linear_takes_one_pass"
        "[squashed in a scan that starts from zero]",
    ),
    Fault(
        "a branch may add something to a cotangent",
        "dpx/clipping/linear.py",
        "return [_together(each) for each in zip(*found, strict=True)]",
        "return [max(each) for each in zip(*found, strict=True)]",
        "tests/clipping/test_clipping_linear.py::test_what_is_not_linear_takes_one_pass"
        "[something else in a branch]",
    ),
    Fault(
        "two passes leave a penalty out of the norm",
        "dpx/clipping/two_pass.py",
        "k in led | tail.uses",
        "k in tail.uses",
        "tests/clipping/test_clipping_penalties.py::test_a_penalty_on_a_weight_that_is_used_once",
    ),
    Fault(
        "rounding of penalties that cancel is left out of the norm",
        "dpx/clipping/fixed_terms.py",
        "return grams.raised(total + error, length, gamma)",
        "return grams.raised(total, length, gamma)",
        "tests/clipping/test_clipping_penalties.py::test_penalties_that_cancel_add_no_more_than_the_threshold",
    ),
    Fault(
        "a penalty counts once beside another one",
        "dpx/clipping/fixed_terms.py",
        "(products * y * z)\n                total += 2 * sum_",
        "(products * y * z)\n                total += sum_",
        "tests/clipping/test_clipping_penalties.py::test_norms_and_sums_are_exact",
    ),
    Fault(
        "a derivative of a weight by hand may add the weight",
        "dpx/clipping/pullback.py",
        "x.axes is None and not x.zero for x in terms",
        "False for x in terms",
        "tests/clipping/test_clipping_penalties.py::test_derivatives_of_weights_that_are_not_linear_fall_back",
    ),
    Fault(
        "a number over a weight counts as a multiple of the weight",
        "dpx/clipping/jaxprs.py",
        "return 1 / number if number and isinstance(eqn.invars[1], core.Literal) else None",
        "return 1 / number if number else None",
        "tests/clipping/test_clipping_products.py::test_a_number_over_a_weight_is_no_multiple_of_it",
    ),
    Fault(
        "complex parameters are not refused",
        "dpx/clipping/params.py",
        "if jnp.issubdtype(leaf.dtype, jnp.complexfloating):",
        "if False:",
        "tests/clipping/test_clipping_products.py::test_complex_parameters_are_refused",
    ),
    Fault(
        "a token below zero is counted beside the last one",
        "dpx/ngram.py",
        "if np.any(mask & ((tokens < 0) | (tokens >= vocab_size))):",
        "if False:",
        "tests/test_ngram.py::test_tokens_outside_the_vocabulary_are_refused",
    ),
    Fault(
        "a block of n-grams starts with what is no token",
        "dpx/ngram.py",
        "    order, vocab_size, start = _checked_table(order, vocab_size, start)\n"
        "    _check_clip(l2_clip_norm)\n    tokens",
        "    _check_clip(l2_clip_norm)\n    tokens",
        "tests/test_ngram.py::test_tables_that_are_none_are_refused_in_a_block_too",
    ),
    Fault(
        "products of the power method are rounded to 32 bits before their noise",
        "experiments/gram/features.py",
        "            exact @ basis,\n",
        "            np.asarray(exact @ basis, np.float32),\n",
        "tests/experiments/test_gram_features.py::test_noise_of_the_power_method_covers_a_document",
    ),
    Fault(
        "noise that floats flush to zero is released",
        "dpx/noise/door.py",
        "if np.any(is_meant & (std < least)):",
        "if False:",
        "tests/noise/test_noise.py::test_noise_that_floats_would_flush_is_refused",
    ),
    Fault(
        "noise of a traced size that floats flush to zero is released",
        "dpx/noise/door.py",
        "return jnp.where(lost, jnp.nan, noisy)",
        "return noisy",
        "tests/noise/test_door.py::test_noise_of_a_traced_size_that_floats_would_flush_makes_nan",
    ),
    Fault(
        "entries of a release share their draws where a sensitivity has more of them",
        "dpx/noise/door.py",
        "        if not fits:\n",
        "        if False:\n",
        "tests/noise/test_door.py::test_entries_of_a_release_have_no_draws_in_common",
    ),
    Fault(
        "squares of traced clips underflow, and with them the noise",
        "dpx/training/transformation.py",
        "sensitivity = norm(jnp.stack(wide)) if traced",
        "sensitivity = jnp.linalg.norm(jnp.stack(wide)) if traced",
        "tests/training/test_privatize.py"
        "::test_traced_clips_whose_squares_leave_their_floats_keep_their_noise",
    ),
    Fault(
        "rounding in the composition of many steps is not in ε",
        "dpx/privacy/events.py",
        "return 1e-16 * steps",
        "return 1e-19 * steps",
        "tests/privacy/test_extremes.py::test_rounding_of_many_compositions_is_in_epsilon",
    ),
    Fault(
        "digits of δ cancel at tiny budgets",
        "dpx/privacy/gaussian.py",
        "if mu < _SMALL_MU:",
        "if False:",
        "tests/privacy/test_extremes.py::test_tiny_budgets_get_the_noise_that_they_need",
    ),
    Fault(
        "a replay compares tables by what they print",
        "dpx/audit/replay.py",
        "pickler.dump(leaf)",
        "pickled.write(str(leaf).encode())",
        "tests/audit/test_replay_instrument.py::test_what_is_returned_is_compared_by_its_content",
    ),
    Fault(
        "a replay prices gradients by the sample of another training",
        "dpx/audit/replay.py",
        "self.found.mixed |= self._batches > 0",
        "self.found.mixed = False",
        "tests/audit/test_replay_instrument.py::test_each_gradient_is_priced_by_its_own_sample",
    ),
    Fault(
        "a law gives all arrays the same noise",
        "dpx/noise/door.py",
        "if law is not None and len(leaves) != 1:",
        "if False:",
        "tests/noise/test_noise.py::test_a_law_draws_for_one_array",
    ),
    Fault(
        "a finished training is repeated under another accountant",
        "dpx/training/fitting.py",
        'if accountant != "pld":',
        "if False:",
        "tests/training/test_fit.py::test_a_folder_goes_on_with_nothing_else",
    ),
    Fault(
        "each event without a user is a user of its own",
        "dpx/distributed/sources.py",
        "    ranks = np.full(len(values), len(values))\n",
        "    ranks = len(values) + np.arange(len(values))\n",
        "tests/distributed/test_distributed.py::test_events_without_a_user_are_one_users",
    ),
    Fault(
        "squares of contributions leave 64 bits",
        "dpx/noise/secure.py",
        "right = (squares <= norm_bound(steps, entries) ** 2) & (rough < 2**62)",
        "right = squares <= norm_bound(steps, entries) ** 2",
        "tests/noise/test_secure.py::test_contributions_whose_squares_leave_64_bits_count_as_zero",
    ),
    Fault(
        "factors of 32 bits are bounded as if they had 64",
        "dpx/clipping/rules.py",
        "jnp.float64 in (left.dtype, right.dtype)",
        "False",
        "tests/clipping/test_clipping_bound.py"
        "::test_inputs_in_32_bits_and_parameters_in_64_are_bounded_in_64",
    ),
    Fault(
        "bytes index a table in their own type",
        "dpx/clipping/uses.py",
        "return index.astype(jnp.int32) if index.dtype.itemsize < 4 else index",
        "return index",
        "tests/clipping/test_clipping_indices.py::test_the_first_byte_and_the_last_do_not_cancel",
    ),
    Fault(
        "two passes drop what a loss writes to a mutable array",
        "dpx/clipping/two_pass.py",
        "clear = not _rounds(precise, leaves) and not _writes(jaxpr)",
        "clear = not _rounds(precise, leaves)",
        "tests/clipping/test_clipping_refs.py::test_a_loss_may_write_to_arrays_of_its_own",
    ),
    Fault(
        "two passes round numbers of one entry",
        "dpx/clipping/two_pass.py",
        'types = [v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")]',
        'types = [v.aval.dtype for v in eqn.outvars if getattr(v.aval, "ndim", 0)]',
        "tests/clipping/test_clipping_narrow.py::test_what_is_rounded_on_the_way_back_takes_one_pass",
    ),
    Fault(
        "a mutable array carries values from one example to the next",
        "dpx/clipping/mixing.py",
        "if any(isinstance(constant, jax.Ref) for constant in constants.values()):",
        "if False:",
        "tests/clipping/test_clipping_refs.py::test_what_one_example_leaves_for_the_next_is_refused",
    ),
    Fault(
        "a collective over other examples is not refused",
        "dpx/clipping/mixing.py",
        "    if named:\n",
        "    if False:\n",
        "tests/clipping/test_clipping_silent.py::test_collectives_over_other_examples_are_refused",
    ),
    Fault(
        "a loss may close over its batch",
        "dpx/clipping/mixing.py",
        "any(_same(constant, leaf) for leaf in call.private)",
        "False",
        "tests/clipping/test_clipping_silent.py::test_a_loss_that_closes_over_the_batch_is_refused",
    ),
    Fault(
        "derivatives that are written by hand are not read for what mixes examples",
        "dpx/clipping/mixing.py",
        "    if eqn in derivatives:\n",
        "    if False:\n",
        "tests/clipping/test_clipping_silent_derivatives.py"
        "::test_collectives_in_derivatives_are_refused",
    ),
    Fault(
        "what a loop carries is taken for independent of parameters",
        "dpx/clipping/jaxprs.py",
        "            if merged == carry:\n",
        "            if True:\n",
        "tests/clipping/test_clipping_silent_derivatives.py"
        "::test_collectives_in_derivatives_are_refused",
    ),
    Fault(
        "a batching rule that is given all examples is not reported",
        "dpx/clipping/mixing.py",
        "        of_all |= _given_all(eqn, known)\n",
        "",
        "tests/clipping/test_clipping_silent_derivatives.py"
        "::test_batching_rules_are_reported_where_they_are_used",
    ),
    Fault(
        "a primitive of somebody else's is taken for one of JAX",
        "dpx/clipping/mixing.py",
        "    if eqn.primitive not in known:\n",
        "    if False:\n",
        "tests/clipping/test_clipping_silent_derivatives.py"
        "::test_primitives_that_are_not_of_jax_are_reported",
    ),
    Fault(
        "keys that are drawn from by place are not refused",
        "dpx/clipping/mixing.py",
        "    if draws.by_place and is_vectorised:\n",
        "    if False:\n",
        "tests/clipping/test_clipping_silent_randomness.py"
        "::test_keys_that_jax_draws_from_by_place_are_refused",
    ),
    Fault(
        "the key of a record depends on its place in the batch",
        "dpx/clipping/randomness.py",
        "    if not is_by_record(key.dtype):\n",
        "    if False:\n",
        "tests/clipping/test_clipping_randomness.py"
        "::test_a_record_keeps_its_key_in_every_implementation",
    ),
    Fault(
        "any derived weight is taken for a multiple of its parameter",
        "dpx/clipping/own_products.py",
        "        jnp.all(jnp.abs(derived - weight * scale) <= error)\n        & jnp",
        "        jnp",
        "tests/clipping/test_clipping_own_products.py::test_norms_and_sums_are_exact",
    ),
    Fault(
        "a product is divided by scales of zero",
        "dpx/clipping/own_products.py",
        "        & jnp.all((size >= SMALLEST_SCALE) & (size <= 1 / SMALLEST_SCALE))\n",
        "",
        "tests/clipping/test_clipping_own_products.py::test_it_is_checked_whether_the_product_serves",
    ),
    Fault(
        "matrix units multiply what is rounded to bfloat16 once",
        "dpx/clipping/rules.py",
        "    return _product(rest.astype(b.dtype), b) + _product(most.astype(b.dtype), b)\n",
        "    return _product(most.astype(b.dtype), b)\n",
        "tests/clipping/test_clipping_narrow.py::test_matrix_units_multiply_bfloat16_numbers",
    ),
)


def table() -> str:
    """The faults in markdown."""
    rows = ["| fault | where | caught by |", "|---|---|---|"]
    for fault in FAULTS:
        nodes = re.split(r" (?=tests/)", fault.test)
        names = (node.removeprefix("tests/").replace("test_", "", 1) for node in nodes)
        rows.append(f"| {fault.name} | `{fault.file}` | `{'`, `'.join(names)}` |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
