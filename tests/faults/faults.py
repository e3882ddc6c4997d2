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
PURPOSES = "tests/training/test_purposes.py::"
SHARED = (
    "tests/experiments/test_keys_of_configs.py::test_no_two_releases_of_a_config_share_a_key[{}]"
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
        "the rows of several tables are added to the first",
        "dpx/clipping/rules.py",
        "block = jnp.arange(k)[None, :, None]",
        "block = jnp.zeros(k, int)[None, :, None]",
        "tests/clipping/test_clipping_indices.py::test_each_of_several_tables_has_its_own_rows",
    ),
    Fault(
        "what is looked up has an exact norm",
        "dpx/clipping/alike.py",
        "exact = mine._replace(rows=0.0, flushed_rows=0.0)",
        "exact = mine._replace(rows=0.0, flushed_rows=0.0, columns=0.0)",
        "tests/clipping/test_clipping_alike.py::test_bounds_of_several_are_those_of_each",
    ),
    Fault(
        "the sum of squares of many parameters is taken for exact",
        "dpx/clipping/groups.py",
        "gamma(len(squares) + 24, total.dtype)",
        "gamma(24, total.dtype)",
        "tests/clipping/test_clipping_rounding.py::test_norms_of_groups_are_above_the_root_of_their_sum",
    ),
    Fault(
        "the sums of a batch without a finite gradient are not zero",
        "dpx/clipping/batches.py",
        "(~keep.any(), sums)",
        "(~mask.any(), sums)",
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
        "only the first piece of gradients that are joined is normed",
        "dpx/clipping/alike.py",
        "norms.append(Norms.of(owners[0], pieces))",
        "norms.append(Norms.of(owners[0], pieces[:, :1]))",
        "tests/clipping/test_clipping_depth.py::test_gradients_of_different_lengths_are_normed_together",
    ),
    Fault(
        "what fills joined gradients up counts in their norm",
        "dpx/clipping/joint.py",
        "jnp.zeros((len(arrays[0]), rest)",
        "jnp.ones((len(arrays[0]), rest)",
        "tests/clipping/test_clipping_depth.py::test_gradients_of_different_lengths_are_normed_together",
    ),
    Fault(
        "parts are grouped as if they were the parameters",
        "dpx/clipping/program.py",
        "[groups[k] for k in parts.owners]",
        "(list(groups) * len(parts.owners))[: len(parts.owners)]",
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
        "np.arange((end - size) // length, end // length)",
        "np.arange(0, size // length)",
        "tests/clipping/test_clipping_depth.py::test_small_gradients_in_two_types_and_several_groups",
    ),
    Fault(
        "small gradients are summed with the clip factors of another group",
        "dpx/clipping/engine.py",
        "rows[groups[joint.members[0]]]",
        "rows[0]",
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
        "return jax.tree.map(each, tree)",
        "return tree",
        "tests/clipping/test_clipping_bound.py::test_narrow_activations_add_no_more_than_the_threshold",
    ),
    Fault(
        "gradients far above the threshold are clipped half",
        "dpx/clipping/groups.py",
        "length = jnp.maximum(norm, clip)",
        "length = jnp.maximum(jnp.sqrt(norm * clip), clip)",
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
    Fault(
        "the last microbatch of each block is not added up",
        "dpx/clipping/batches.py",
        "last = jnp.minimum(first + BLOCK, count)",
        "last = jnp.minimum(first + BLOCK - 1, count)",
        "tests/clipping/test_clipping.py::test_more_microbatches_than_are_added_up_plainly",
    ),
    Fault(
        "sums over microbatches forget what they rounded off",
        "dpx/clipping/batches.py",
        "return _sums.result(total), *found",
        "return total.high, *found",
        "tests/clipping/test_clipping_bound.py::test_microbatches_keep_what_is_rounded_off",
    ),
    Fault(
        "equal blocks of which other values are taken later are one",
        "dpx/clipping/repeats.py",
        "return (tuple(form), avals, tuple(number[v] for v in results)),",
        "return (tuple(form), avals, len(results)),",
        "tests/clipping/test_clipping_repeats.py"
        "::test_blocks_of_which_other_values_are_taken_later_are_not_taken_for_others",
    ),
    Fault(
        "of a sum of multiples of a weight the first alone counts",
        "dpx/clipping/pullback.py",
        "frozenset().union(*(x.ratio for x in linear)), axes)",
        "linear[0].ratio, axes)",
        "tests/clipping/test_clipping_pullback.py::test_what_is_known_of_a_derivative_is_true",
    ),
    Fault(
        "what is added to a cotangent is taken for zero when it is moved",
        "dpx/clipping/pullback.py",
        "return Value(varies, axes=axes, zero=x.zero)",
        "return Value(varies, axes=axes, zero=True)",
        "tests/clipping/test_clipping_pullback.py"
        "::test_what_is_not_linear_is_unclear_unless_it_is_trusted",
    ),
    Fault(
        "a sum with a scale is put back in the wrong order of axes",
        "dpx/clipping/small_values.py",
        "total = total.transpose([order.index(a) for a in sorted(order)])",
        "total = total.transpose(order)",
        "tests/clipping/test_clipping_small_values.py"
        "::test_a_gradient_is_that_of_the_product_times_the_array",
    ),
    Fault(
        "a parameter that is cut along two axes is cut along one",
        "dpx/clipping/parts.py",
        "if len(slices) < len(taken) or len(axes) > 1:",
        "if len(slices) < len(taken):",
        "tests/clipping/test_clipping_parts.py::test_what_cannot_be_cut_is_as_exact",
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
        "dpx/training/purposes.py",
        'self._key("dropout of training", label)',
        'self._key("noise of training", label)',
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
    Fault(
        "an event of 16 bits is accounted in 16 bits",
        "dpx/privacy/events.py",
        "            changes[field] = number\n",
        "            changes[field] = value\n",
        "tests/privacy/test_narrow_numbers.py::test_a_ledger_of_narrow_events_is_one_of_wide_events",
    ),
    Fault(
        "the noise of an epsilon of 16 bits is computed in 16 bits",
        "dpx/privacy/gaussian.py",
        "    epsilon, delta = check_epsilon(epsilon), check_delta(delta)\n",
        "    check_epsilon(epsilon), check_delta(delta)\n",
        "tests/privacy/test_narrow_numbers.py::test_gaussian_noise_is_as_much_as_its_epsilon_needs",
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
        REMOVED.format("1-grams"),
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
        "tests/gram/test_gram_columns.py::test_clipping_is_the_projection_for_every_input",
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
        "two rows of a run share noise and samples",
        "experiments/dp_transformer/training.py",
        "keys=keys.training(label),",
        'keys=keys.training("row", begun=0),',
        LEDGER.format("text"),
    ),
    Fault(
        "the token probabilities of a text run have the name of its prior",
        "experiments/dp_transformer/language_model.py",
        'keys.noise("token probabilities")',
        'keys.noise("prior")',
        LEDGER.format("text"),
    ),
    Fault(
        "all n-grams have the same noise",
        "experiments/dp_transformer/language_model.py",
        """for order in config.ngrams:
        row = f"dp_{order}gram"
        model = _fit_ngram(keys.noise(row),""",
        """key = keys.noise("n-grams")
    for order in config.ngrams:
        row = f"dp_{order}gram"
        model = _fit_ngram(key,""",
        SHARED.format("quickstart:tiny"),
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
        "two repetitions of a recommender have one name",
        "experiments/dp_transformer/recommender_rows.py",
        'return self.keys.noise(f"{release}{self.suffix}")',
        "return self.keys.noise(release)",
        SHARED.format("recommender:synthetic,tiny"),
    ),
    Fault(
        "two repetitions of one-shot recommenders have one name",
        "experiments/gram/one_release.py",
        'noise = lambda row, suffix=suffix: keys.noise(f"{row}{suffix}")',
        "noise = lambda row: keys.noise(row)",
        SHARED.format("gram:recommender,tiny"),
    ),
    Fault(
        "all blocks of a reader have the same noise",
        "experiments/cross_attention/reader.py",
        """for number, layer in enumerate(self.attention):
            key = keys.noise(f"memory of block {number}")
""",
        """key = keys.noise("memory")
        for layer in self.attention:
""",
        SHARED.format("cross_attention:reader,tiny"),
    ),
    Fault(
        "the memories of two trials have one name",
        "experiments/cross_attention/query_error.py",
        'return keys.noise(f"{cell.place} of memory {trial}")',
        "return keys.noise(cell.place)",
        SHARED.format("cross_attention:size,tiny"),
    ),
    Fault(
        "draws of a memory of tokens have the same noise",
        "experiments/cross_attention/next_tokens.py",
        """        for draw in range(config.draws):
            label = f"{name}_draw{draw}" if draw else name
            memory = release_memory(config, keys.noise(label), total)
""",
        """        key = keys.noise(name)
        for draw in range(config.draws):
            label = f"{name}_draw{draw}" if draw else name
            memory = release_memory(config, key, total)
""",
        SHARED.format("next_tokens:tiny"),
    ),
    Fault(
        "the model without privacy gives a private row its output bias",
        "experiments/dp_transformer/recommender.py",
        "bias, start, prior = recommender_rows.prior(config, prepared.train, key)\n",
        "_, start, prior = recommender_rows.prior(config, prepared.train, key)\n"
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
        'config, key = repetition.config, repetition.noise("transitions")',
        'config, key = repetition.config, repetition.noise("prior")',
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
        "samples follow from the secret of the noise",
        "dpx/training/purposes.py",
        "self._of_samples = seed.generate_state(8).tobytes()",
        "self._of_samples = self._of_noise",
        PURPOSES + "test_what_is_for_different_purposes_shares_nothing",
    ),
    Fault(
        "keys follow from their names alone",
        "dpx/training/purposes.py",
        "key=secret, digest_size=size",
        "digest_size=size",
        PURPOSES + "test_what_is_for_different_purposes_shares_nothing",
    ),
    Fault(
        "a release and a training of one name share a key",
        "dpx/training/purposes.py",
        'f"{kind}: {name}".encode()',
        "name.encode()",
        PURPOSES + "test_what_is_for_different_purposes_shares_nothing",
    ),
    Fault(
        "the label is no part of the key of a training's noise",
        "dpx/training/purposes.py",
        'self._key("noise of training", label)',
        'self._key("noise of training", "")',
        PURPOSES + "test_trainings_of_two_labels_share_neither_noise_nor_samples_nor_masks",
    ),
    Fault(
        "trainings of two labels share their samples",
        "dpx/training/purposes.py",
        'self._seed("samples of training", label)',
        'self._seed("samples of training", "")',
        PURPOSES + "test_trainings_of_two_labels_share_neither_noise_nor_samples_nor_masks",
    ),
    Fault(
        "a name is given its key twice",
        "dpx/training/purposes.py",
        "if given and (begun is None or begun != repeated):",
        "if False:",
        PURPOSES + "test_a_name_serves_once[noise]",
    ),
    Fault(
        "a training of other data has the keys of the first",
        "dpx/training/purposes.py",
        "(begun is None or begun != repeated)",
        "begun is None",
        PURPOSES + "test_a_training_under_keys_is_not_repeated_with_other_data_or_arguments",
    ),
    Fault(
        "what a training begins with is not remembered",
        "dpx/training/keys.py",
        "of_label(key, (found, settings))",
        'of_label(key, (found, ""))',
        PURPOSES + "test_a_training_under_keys_is_not_repeated_with_other_data_or_arguments",
    ),
    Fault(
        "the fingerprint of a noise seed is one that can be looked up",
        "dpx/training/keys.py",
        "salt=salt, n=2**14",
        'salt=b"", n=2**14',
        "tests/training/test_resuming.py"
        "::test_a_fingerprint_says_nothing_of_a_seed_in_another_folder",
    ),
    Fault(
        "the random bytes of a fingerprint are of the seed",
        "dpx/training/keys.py",
        '{"salt": os.urandom(32).hex()}',
        '{"salt": hashlib.sha256(str(noise_seed).encode()).hexdigest()}',
        "tests/training/test_resuming.py"
        "::test_a_fingerprint_says_nothing_of_a_seed_in_another_folder",
    ),
    Fault(
        "noise comes from the public seed",
        "dpx/training/keys.py",
        "return from_seed(config.noise_seed)",
        "return from_seed(config.seed)",
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
        "    if left:",
        "    if False:",
        "tests/launch/test_experiments.py::test_new_keys_are_not_made_for_a_run_that_has_begun",
    ),
    Fault(
        "a run that lost its keys releases once more what is no model",
        "dpx/training/resuming.py",
        "names.difference(_BEFORE) if settings is None else names.intersection(_TRAINED)",
        "names.intersection(_TRAINED)",
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
        "the key of the scores of a finished selection is kept",
        "dpx/launch/selection.py",
        "(folder / records.PRIVATE / _DRAWN).unlink(missing_ok=True)",
        "pass",
        "tests/launch/test_sweep_selection.py"
        "::test_what_was_selected_stands_when_the_trials_are_deleted",
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
        "os.path.realpath(os.path.join(record.folder, str(path)))",
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
        're.split("\\r\\n?|\\n", text)',
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
    Fault(
        "an error shows the words of a key",
        "dpx/_validate.py",
        'f"key of type {type(key).__name__}{shape} must be',
        'f"key={key} must be',
        "tests/test_contracts.py::test_what_is_no_key_is_named_and_no_word_of_it_is_shown",
    ),
    Fault(
        "a key that is given as a seed is shown",
        "dpx/training/sampling.py",
        'if np.ndim(given) or jnp.issubdtype(getattr(given, "dtype", int), jax.dtypes.prng_key):',
        "if False:",
        "tests/test_contracts.py::test_a_key_that_is_given_as_a_seed_is_not_shown",
    ),
    Fault(
        "a report is silent on guarantees that do not add up",
        "dpx/launch/report.py",
        "return added_up + [_apart(found) for found in kinds.values() if len(found) > 1]",
        "return added_up",
        "tests/launch/test_run.py::test_totals_are_of_one_unit",
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
        "noise_of = keys.derive(jax.random.wrap_key_data(jax.numpy.asarray(words))).noise",
        "noise_of = lambda name: jax.random.wrap_key_data(jax.numpy.asarray(words))",
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
        "    l2_clip_norm = _check_clip(l2_clip_norm)\n    tokens",
        "    l2_clip_norm = _check_clip(l2_clip_norm)\n    tokens",
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
        "dpx/clipping/look_ups.py",
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
        "(jnp.abs(derived - weight * scale) <= error) &",
        "",
        "tests/clipping/test_clipping_own_products.py::test_norms_and_sums_are_exact",
    ),
    Fault(
        "a product is divided by scales of zero",
        "dpx/clipping/own_products.py",
        "(size >= SMALLEST_SCALE) & (size <= 1 / SMALLEST_SCALE)",
        "size > -1",
        "tests/clipping/test_clipping_own_products.py::test_it_is_checked_whether_the_product_serves",
    ),
    Fault(
        "matrix units multiply what is rounded to bfloat16 once",
        "dpx/clipping/rules.py",
        "    return _product(rest.astype(b.dtype), b) + _product(most.astype(b.dtype), b)\n",
        "    return _product(most.astype(b.dtype), b)\n",
        "tests/clipping/test_clipping_narrow.py::test_matrix_units_multiply_bfloat16_numbers",
    ),
    Fault(
        "a sample that is cut off is priced without the record that joins",
        "dpx/privacy/dpsgd.py",
        'check_integer(num_examples, "num_examples") + 1',
        'check_integer(num_examples, "num_examples")',
        "tests/privacy/test_ledger.py::test_a_sample_that_is_cut_off_is_priced_for_one_record_more",
    ),
    Fault(
        "a total forgets its plain guarantees where it is spent again",
        "dpx/privacy/ledger.py",
        "event=None if plain else event",
        "event=event",
        "tests/privacy/test_ledger.py::test_a_total_with_a_plain_guarantee_has_no_event",
    ),
    Fault(
        "units are compared with the last release alone",
        "dpx/privacy/ledger.py",
        "for _, before in self._entries:\n",
        "for _, before in self._entries[-1:]:\n",
        "tests/privacy/test_ledger.py::test_units_are_compared_with_all_that_was_spent_before",
    ),
    Fault(
        "a total of guarantees for replacement speaks of adding and removing",
        "dpx/privacy/ledger.py",
        "neighboring = stated[0].neighboring if stated else ADD_OR_REMOVE_ONE",
        "neighboring = ADD_OR_REMOVE_ONE",
        "tests/privacy/test_ledger.py::test_a_total_speaks_of_the_relation_of_its_parts",
    ),
    Fault(
        "sampling amplifies guarantees for replacement as those for removal",
        "dpx/privacy/ledger.py",
        "or (neighboring == ADD_OR_REMOVE_ONE and accountable(event))",
        "or accountable(event)",
        "tests/privacy/test_ledger.py::test_a_total_speaks_of_the_relation_of_its_parts",
    ),
    Fault(
        "units are compared until there is a bare event",
        "dpx/privacy/ledger.py",
        "                if not isinstance(before, PrivacyGuarantee):\n                    continue",
        "                if not isinstance(before, PrivacyGuarantee):\n                    break",
        "tests/privacy/test_ledger.py::test_units_are_compared_with_all_that_was_spent_before",
    ),
    Fault(
        "groups of records are drawn from the numbers that sample the first step",
        "dpx/training/sampling.py",
        "generator(0, 1).integers",
        "generator(0).integers",
        "tests/training/test_sampling.py::test_groups_are_drawn_apart_from_samples",
    ),
    Fault(
        "a replay prices samples that are cut off as whole ones",
        "dpx/training/sampling.py",
        "    _watch.check_samples(max_batch_size)\n",
        "",
        "tests/audit/test_replay_instrument.py::test_samples_that_are_cut_off_cannot_be_priced",
    ),
    Fault(
        "the seed of samples is no key to a replay",
        "dpx/training/sampling.py",
        '    _watch.key_used(root.generate_state(_watch.KEY_WORDS), "sampling")\n',
        "",
        "tests/audit/test_replay_instrument.py::test_every_other_difference_is_named",
    ),
    Fault(
        "processes compare the settings that both have",
        "dpx/_processes.py",
        "if (name in first, first.get(name)) != (name in other, other.get(name))",
        "if first.get(name) != other.get(name)",
        "tests/training/test_processes.py::test_settings_of_all_processes_are_compared",
    ),
    Fault(
        "correlated noise remembers the newest residue last",
        "dpx/training/correlated.py",
        "jnp.concatenate([(x - y)[None], old])[: len(rest)]",
        "jnp.concatenate([old, (x - y)[None]])[-len(rest) :]",
        "tests/training/test_correlated.py::test_what_the_optimizer_sees_is_the_slow_construction",
    ),
    Fault(
        "a total assumes what its first release does",
        "dpx/privacy/ledger.py",
        "assumptions += spent.assumptions",
        "assumptions = assumptions or list(spent.assumptions)",
        "tests/privacy/test_ledger.py::test_a_total_assumes_what_each_of_its_parts_does",
    ),
    Fault(
        "a cached multiplier may cost a twentieth more",
        "dpx/privacy/dpsgd.py",
        "0.99 * epsilon <= spent(stored) <= epsilon",
        "0.99 * epsilon <= spent(stored) <= 1.05 * epsilon",
        "tests/privacy/test_ledger.py::test_a_cached_multiplier_with_a_thousandth_too_little_noise_is_not_used",
    ),
    Fault(
        "the budget of a multiplier has a larger δ",
        "dpx/privacy/gaussian.py",
        "small = min(delta, 0.1 / noise_multiplier)",
        "small = max(delta, 0.1 / noise_multiplier)",
        "tests/privacy/test_ledger.py::test_a_budget_of_a_multiplier_has_no_larger_delta",
    ),
    Fault(
        "that samples are secret is no assumption",
        "dpx/privacy/dpsgd.py",
        '            "which records are sampled stays as secret as the noise",\n',
        "",
        "tests/privacy/test_ledger.py::test_training_says_what_it_rests_on",
    ),
    Fault(
        "groups follow from the order of the records",
        "dpx/training/sampling.py",
        "generator(0, 1).integers(groups, size=ids.max() + 1)[ids]",
        "ids % groups",
        "tests/training/test_sampling.py::test_groups_are_drawn_and_each_record_is_in_one",
    ),
    Fault(
        "two children of one seed have the same samples",
        "dpx/training/sampling.py",
        "spawned = (*root.spawn_key, *purpose)",
        "spawned = purpose",
        "tests/training/test_sampling.py::test_children_of_one_seed_have_samples_of_their_own",
    ),
    Fault(
        "noise that is taken back later is written to checkpoints",
        "dpx/training/loop.py",
        "(bands == 1 and done % checkpoint_every == 0)",
        "done % checkpoint_every == 0",
        "tests/training/test_correlated.py::test_no_checkpoint_is_written_before_the_end",
    ),
    Fault(
        "banded noise covers the largest group of parameters alone",
        "dpx/training/loop.py",
        "sensitivity = math.hypot(*jax.tree.leaves(clips))",
        "sensitivity = max(jax.tree.leaves(clips))",
        "tests/training/test_correlated.py::test_all_groups_of_parameters_are_in_the_sensitivity",
    ),
    Fault(
        "a training goes on with samples that are cut off elsewhere",
        "dpx/training/fitting.py",
        'settings["max_batch_size"] = max_batch_size',
        "pass",
        "tests/training/test_fitting.py::test_a_call_that_goes_on_differs_in_nothing_that_counts",
    ),
    Fault(
        "a training goes on with another adaptive clipping norm",
        "dpx/training/adaptive.py",
        "[None if x is None else float(x) for x in dataclasses.astuple(l2_clip_norm)]",
        "[float(l2_clip_norm.start)]",
        "tests/training/test_fitting.py::test_a_call_that_goes_on_differs_in_nothing_that_counts",
    ),
    Fault(
        "sampling has 16 bits of entropy",
        "dpx/training/keys.py",
        '"sampling": os.urandom(32).hex()',
        '"sampling": os.urandom(2).hex()',
        "tests/training/test_resuming.py::test_keys_have_all_bits_of_their_entropy",
    ),
    Fault(
        "a secret key has 32 bits",
        "dpx/training/purposes.py",
        "return of_words(np.frombuffer(os.urandom(4 * _key_words()), np.uint32))",
        "return jax.random.key(int.from_bytes(os.urandom(4)))",
        "tests/training/test_resuming.py::test_keys_have_all_bits_of_their_entropy",
    ),
    Fault(
        "noise of the second moments is for features that are not rounded",
        "dpx/noisy_head/moment_sums.py",
        "stds = joint_noise(rounded(hyper, dim))",
        "stds = joint_noise(hyper)",
        "tests/noisy_head/test_noisy_head_privacy.py::test_noise_of_one_release_covers_the_rounding_of_features",
    ),
    Fault(
        "that only the last iterate is released is no assumption",
        "dpx/noisy_head/accounting.py",
        '+ (_LAST_ITERATE_ONLY if self.accounting == "last_iterate" else ())',
        "",
        "tests/noisy_head/test_noisy_head_privacy.py::test_a_guarantee_says_what_its_user_must_see_to",
    ),
    Fault(
        "NoisyHead starts outside of its ball",
        "dpx/noisy_head/descent.py",
        "np.linalg.norm(init) > radius * (1 + 1e-12)",
        "np.linalg.norm(init, 2) > radius * (1 + 1e-12)",
        "tests/noisy_head/test_noisy_head_privacy.py::test_misuse",
    ),
    Fault(
        "a record does not say what is not covered",
        "dpx/launch/run.py",
        '"not_covered": list(outcome.not_covered),',
        '"not_covered": [],',
        "tests/launch/test_run.py::test_what_is_not_covered_is_in_the_record_and_the_report",
    ),
    Fault(
        "that a seed must stay unknown is no assumption",
        "dpx/launch/run.py",
        "        found.append(_SEEDED)\n",
        "        pass\n",
        "tests/launch/test_run.py::test_how_it_was_run_is_an_assumption",
    ),
    Fault(
        "of plain releases beside others the largest δ counts",
        "dpx/launch/run.py",
        "min(plain + largest * timed, 1 - 1e-12)",
        "min(max(plain, largest * timed), 1 - 1e-12)",
        "tests/launch/test_run.py::test_the_total_is_at_the_largest_delta_beside_the_sum_of_plain_ones",
    ),
    Fault(
        "a report leaves assumptions out",
        "dpx/launch/report.py",
        'for assumption in total["assumptions"]:',
        "for assumption in ():",
        "tests/launch/test_run.py::test_what_is_not_covered_is_in_the_record_and_the_report",
    ),
    Fault(
        "an audit spends its failures twice",
        "dpx/audit/bounds.py",
        "    failure = (1.0 - confidence) / 2\n\n    thresholds",
        "    failure = 1.0 - confidence\n\n    thresholds",
        "tests/audit/test_audit.py::test_each_of_several_bounds_has_its_share_of_the_failures",
    ),
    Fault(
        "ties of an audit are broken by the coins",
        "dpx/audit/guessing.py",
        'np.argsort(-scores, kind="stable")',
        "np.lexsort((~included, -scores))",
        "tests/audit/test_audit.py::test_ties_between_scores_are_broken_by_what_coins_do_not_know",
    ),
    Fault(
        "a replay compares the first leaf of a release",
        "dpx/audit/comparison.py",
        "else sum(map(np.sum, sums))",
        "else np.sum(sums[0])",
        "tests/audit/test_replay_instrument.py::test_all_leaves_of_a_release_count",
    ),
    Fault(
        "a replay does not compare keys of dropout with those of noise",
        "dpx/audit/recordings.py",
        "for seen in self.releases] + self.keys",
        "for seen in self.releases]",
        "tests/audit/test_replay_instrument.py::test_every_other_difference_is_named",
    ),
    Fault(
        "normalizing factors above 1 make a cotangent infinite",
        "dpx/clipping/groups.py",
        "max(clip / NORMALIZE_GAMMA, 1.0)",
        "1.0",
        "tests/clipping/test_clipping_options.py::test_a_normalized_example_cannot_make_the_sum_infinite",
    ),
    Fault(
        "clip factors that flush a gradient are used",
        "dpx/clipping/groups.py",
        "counts = keep & (length <= clip / SMALLEST)",
        "counts = keep",
        "tests/clipping/test_clipping_rounding.py::test_clip_factors_too_small_to_scale_by_are_zero",
    ),
    Fault(
        "of several axes only the longest rounds",
        "dpx/clipping/rounding.py",
        "        roundings += last\n",
        "        roundings = max(roundings, last)\n",
        "tests/clipping/test_clipping_rounding.py::test_every_axis_that_is_added_up_rounds",
    ),
    Fault(
        "the sum over a batch is taken to round half as much",
        "dpx/clipping/clipped.py",
        "return 2 * batch_size * (share",
        "return batch_size * (share",
        "tests/clipping/test_clipping_rounding.py::test_the_sum_of_a_batch_rounds_as_often_as_it_has_examples",
    ),
    Fault(
        "under jit every head of a sketch has the whole budget",
        "dpx/cross_attention/sketch.py",
        "change = whole_change(features, domain, heads) * whole_unit(largest)\n    moments",
        "change = whole_change(features, domain, 1) * whole_unit(largest)\n    moments",
        "tests/cross_attention/test_declared_noise.py::test_a_sketch_has_the_same_noise_under_jit",
    ),
    Fault(
        "rounding of one factor is missing in the noise of a sketch",
        "dpx/cross_attention/moments.py",
        "(bounds[0] - steps) * bounds[1] + steps * (bounds[1] - steps)",
        "(bounds[0] - steps) * bounds[1]",
        "tests/cross_attention/test_declared_noise.py::test_a_sketch_covers_the_rounding_of_both_factors",
    ),
    Fault(
        "rounding is missing in the noise of trees of a memory",
        "dpx/cross_attention/structures.py",
        "change = 2 * domain.value_norm + leaf_sums.rounding(longest, columns)",
        "change = 2 * domain.value_norm",
        "tests/cross_attention/test_declared_noise.py::test_gaussian_trees_of_a_memory_cover_the_rounding_of_a_row",
    ),
    Fault(
        "weights beyond their bound enter the leaves",
        "dpx/cross_attention/leaf_sums.py",
        "rows = np.where((squares <= bound**2)[:, None], rows, 0)",
        "pass",
        "tests/cross_attention/test_declared_noise.py::test_weights_beyond_their_bound_count_as_zero",
    ),
    Fault(
        "the paper's budget has its slack on top",
        "dpx/cross_attention/node_noise.py",
        "epsilon / structures, delta / structures / 2, delta / structures / 2",
        "epsilon / structures, delta / structures, delta / structures / 2",
        "tests/cross_attention/test_declared_noise.py::test_parts_of_the_papers_budget_compose_to_it",
    ),
    Fault(
        "that rows lie within their bounds is no assumption",
        "dpx/cross_attention/sketch.py",
        '+ (() if clip else ("data within the declared bounds",))',
        "",
        "tests/cross_attention/test_declared_noise.py::test_a_memory_says_what_it_assumes",
    ),
    Fault(
        "rounding is missing in how far a column may move",
        "dpx/gram/mechanisms.py",
        "* steps + 2 * noise.secure.rounding(n)",
        "* steps",
        "tests/gram/test_gram_accounting.py::test_columns_that_are_rounded_are_longer_and_farther_apart",
    ),
    Fault(
        "a sum of columns is released with another clipping",
        "dpx/gram/releases.py",
        'options = {"column_bound": column_bound, "clip": clip, "n": n}',
        'options = {"column_bound": column_bound, "clip": True, "n": n}',
        "tests/gram/test_gram_columns.py::test_a_sum_is_released_with_the_clipping_that_it_was_made_with",
    ),
    Fault(
        "only the first leaf of a release has to be finite",
        "dpx/noise/door.py",
        "for leaf in jax.tree.leaves(released):",
        "for leaf in jax.tree.leaves(released)[:1]:",
        "tests/noise/test_door.py::test_every_leaf_of_a_release_has_to_be_finite",
    ),
    Fault(
        "that the number of users is public is no assumption",
        "dpx/recommend/popularity.py",
        '("the catalogue of items is public", "the number of users is public")',
        '("the catalogue of items is public",)',
        "tests/recommend/test_popularity.py::test_what_is_public_is_an_assumption",
    ),
    Fault(
        "norms taken together forget what the sum over positions rounds",
        "dpx/clipping/alike.py",
        "gamma(in_products(len(uses) * (size + 1)), dtype)",
        "gamma(in_products(0), dtype)",
        "tests/clipping/test_clipping_alike.py::test_bounds_of_several_are_those_of_each[rounded-uses apart]",
    ),
    Fault(
        "norms taken together have the rounding of the first",
        "dpx/clipping/alike.py",
        "each = [grams.Errors.of(layout, dtype) for layout in layouts]",
        "each = [grams.Errors.of(layouts[0], dtype) for _ in layouts]",
        "tests/clipping/test_clipping_alike.py::test_bounds_of_several_are_those_of_each"
        "[rounded-parameters stacked]",
    ),
    Fault(
        "norms that a scan adds up are not rounded up",
        "dpx/clipping/two_pass.py",
        "norms.append(jnp.sum(parts) * (1 + error))",
        "norms.append(jnp.sum(parts))",
        "tests/clipping/test_clipping_two_pass.py::test_norms_that_a_scan_adds_up_are_rounded_up_for_each_of_its_iterations",
    ),
    Fault(
        "two passes scale all groups by the clip factors of one",
        "dpx/clipping/two_pass.py",
        "together.setdefault(group, [])",
        "together.setdefault(0, [])",
        "tests/clipping/test_clipping_two_pass.py::test_groups_masks_frozen_parameters_and_aux_at_once",
    ),
    Fault(
        "gradients held in two passes are scaled by the clip factors of another group",
        "dpx/clipping/two_pass.py",
        "_sum(choices[k], held, weights[groups[k]])",
        "_sum(choices[k], held, weights[0])",
        "tests/clipping/test_clipping_two_pass.py::test_groups_masks_frozen_parameters_and_aux_at_once",
    ),
    Fault(
        "two passes round the gradients of narrow parameters",
        "dpx/clipping/two_pass.py",
        "return narrow or program.captured",
        "return program.captured",
        "tests/clipping/test_clipping_narrow.py::test_narrow_parameters_take_one_pass",
    ),
    Fault(
        "a product whose result is narrow counts as wide",
        "dpx/clipping/two_pass.py",
        "found |= any(given) and",
        "found |= all(given) and",
        "tests/clipping/test_clipping_narrow.py::test_what_is_rounded_on_the_way_back_takes_one_pass",
    ),
    Fault(
        "two passes that are chosen multiply at the default precision",
        "dpx/clipping/two_pass.py",
        '        with jax.default_matmul_precision("highest"):\n            precise',
        "        if True:\n            precise",
        "tests/clipping/test_clipping_bound.py::test_two_passes_multiply_at_the_highest_precision",
    ),
    Fault(
        "only the first backward pass that is written by hand is looked at",
        "dpx/clipping/linear.py",
        "                    return custom.title(eqn)\n            continue",
        "                    return custom.title(eqn)\n                return None\n            continue",
        "tests/clipping/test_clipping_linear.py::test_every_backward_pass_of_a_loss_is_looked_at",
    ),
    Fault(
        "a cotangent that is rounded counts as linear",
        "dpx/clipping/linear.py",
        '"reduce_sum", "reduce_window_sum"',
        '"reduce_precision", "reduce_sum", "reduce_window_sum"',
        "tests/clipping/test_clipping_linear.py::test_no_function_that_is_not_linear_is_taken_for_one",
    ),
    Fault(
        "a backward pass that cannot be traced counts as linear",
        "dpx/clipping/linear.py",
        "traced is None or not _is_linear",
        "traced is not None and not _is_linear",
        "tests/clipping/test_clipping_linear.py::test_a_backward_pass_that_cannot_be_traced_is_not_known_to_be_linear",
    ),
    Fault(
        "equations that differ in what they compute count as repeated",
        "dpx/clipping/repeats.py",
        "form.append((eqn.primitive, eqn.ctx,",
        "form.append((eqn.ctx,",
        "tests/clipping/test_clipping_repeats.py::test_blocks_that_differ_in_one_thing_are_not_taken_for_each_other[by_an_equation]",
    ),
    Fault(
        "the first document decides which column is read",
        "dpx/data/newsgroups.py",
        """            if len(known) > 1 and known is names:
                raise ValueError(
                    f"{path}: say which column holds the text: call it text, or name one of "
                    f"{', '.join(names)}"
                )
""",
        """            if known is names:
                longest = max(zip(rows[0][1], names), key=lambda pair: len(pair[0]))
                known = [longest[1]]
""",
        "tests/data/test_newsgroups.py::test_no_document_decides_what_is_read_of_others",
    ),
    Fault(
        "the first document decides how many lines are header",
        "dpx/data/newsgroups.py",
        """    if kind == ".tab":
        if not rows""",
        """    if kind == ".tab" or {cell.strip() for cell in rows[0][1]} <= _ORANGE_TYPES:
        if not rows""",
        "tests/data/test_newsgroups.py::test_no_document_decides_what_is_read_of_others",
    ),
    Fault(
        "a document in a folder that is called like a file is two records",
        "dpx/data/files.py",
        'path for path in folder.rglob("*") if path.is_file()',
        'folder.rglob("*")',
        "tests/data/test_text.py"
        "::test_each_file_of_a_folder_is_read_once_whatever_its_folders_are_called",
    ),
    Fault(
        "two passes begin with a constant, which a compiler spreads over what is beyond it",
        "dpx/clipping/two_pass.py",
        "        ones = positive + (1 - positive)\n",
        "        ones = jnp.ones_like(positive)\n",
        "tests/clipping/test_clipping_two_pass.py::test_a_penalty_on_a_parameter_without_a_rule_is_in_its_norms",
    ),
    Fault(
        "a backward pass by hand is given what a factor of its weight has multiplied",
        "dpx/clipping/uses.py",
        "functools.partial(_multiplied, view.gain, right)",
        "functools.partial(_times, view.gain, right)",
        "tests/clipping/test_clipping_custom.py"
        "::test_a_limit_in_the_backward_pass_holds_before_the_gain_of_the_weight[0.25]",
    ),
    Fault(
        "types that follow from the records count as public without a word",
        "dpx/training/fitting.py",
        "assumptions=(*assumptions, *inferred_types(data))",
        "assumptions=assumptions",
        "tests/training/test_fit.py"
        "::test_takes_what_users_have_and_says_whether_types_follow_from_it[pandas]",
    ),
    Fault(
        "a training goes on with another generator of random numbers",
        "dpx/training/fitting.py",
        'settings["generator"] = generator',
        "pass",
        "tests/training/test_fit_configs.py::test_a_training_does_not_go_on_with_another_generator[rbg-unsafe_rbg]",
    ),
    Fault(
        "banded noise is weighted at a device's own precision",
        "dpx/training/correlated.py",
        "left, 1, precision=highest)",
        "left, 1)",
        "tests/test_matmul_precision.py::test_products_are_at_the_highest_precision[banded]",
    ),
    Fault(
        "rows of trees are not clipped under jit",
        "dpx/cross_attention/tree.py",
        "    K, V = domain.enter(K, V, clip=clip)\n    dtype",
        "    dtype",
        "tests/cross_attention/test_unfit_memories.py::test_trees_clip_rows_under_jit",
    ),
    Fault(
        "an audit of steps takes the spread that it saw for the largest that there may be",
        "dpx/audit/steps.py",
        "std * math.sqrt(degrees / stats.chi2.ppf(failure, degrees))",
        "std",
        "tests/audit/test_audit.py::test_each_of_several_bounds_has_its_share_of_the_failures",
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
