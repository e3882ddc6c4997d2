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
READERS = (
    "tests/audit/test_replay_readers.py::test_an_odd_record_moves_nothing_but_its_own_part[{}]"
)
ONE_RECORD = (
    "tests/experiments/test_one_record_of_a_file.py::test_one_record_changes_its_own_row_alone[{}]"
)
SECRET = LOOP + "test_all_randomness_comes_from_its_own_secret"
CONFIG = (
    "tests/experiments/test_replay_configs.py"
    "::test_a_record_moves_each_release_by_what_it_declares[{},tiny]"
)
PLANNED = "tests/experiments/test_plans.py::test_a_run_costs_what_its_plan_says[{},tiny]"
SCORED = (
    "tests/experiments/test_scores.py"
    "::test_no_held_out_record_moves_a_score_by_more_than_its_candidate_says[{},tiny]"
)
LEDGER = {
    "text": CONFIG.replace(",", ":").format("quickstart"),
    "recommender": CONFIG.format("recommender:amazon"),
    "recommender, warm": CONFIG.format("recommender:amazon_warm"),
}
EXACT = "tests/clipping/test_clipping_exact.py::test_norms_and_sums_are_exact[{}]"
PROGRAM = "tests/clipping/test_clipping_programs.py::test_norms_and_sums_are_exact[{}]"
PARTS = "tests/clipping/test_clipping_parts.py::test_norms_and_sums_are_exact[{}]"
BLOCKS = "tests/clipping/test_clipping_blocks.py::test_norms_and_sums_are_exact[{}]"
BY_PLACE = (
    "tests/clipping/test_clipping_silent.py"
    "::test_keys_that_jax_draws_from_by_place_are_refused[auto-rbg]"
)
VOIDS = "tests/clipping/test_clipping_silent.py::test_what_voids_the_sensitivity_is_refused[{}]"
MAY_VOID = (
    "tests/clipping/test_clipping_silent.py::test_what_may_void_the_sensitivity_is_reported[{}]"
)
WITHIN = (
    "tests/clipping/test_clipping_meshes.py"
    "::test_gradients_of_kernels_in_branches_and_loops_are_right_where_the_batch_is_sharded"
)
STREAM = "tests/noise/test_stream.py::"
SECURE = "tests/training/test_secure_training.py::"
PURPOSES = "tests/training/test_purposes.py::"
WORST = (
    "tests/experiments/test_sensitivities.py"
    "::test_the_worst_record_moves_a_release_by_what_it_declares[{}]"
)
REFUSED = (
    "tests/training/test_fit_refused.py::test_a_refused_call_is_one_line_before_anything_is_drawn"
)
RESUMED = (
    "tests/training/test_resuming.py"
    "::test_a_killed_call_goes_on_bitwise_under_what_it_began_with[{}]"
)
GOES_ON = "tests/training/test_resuming.py::test_a_call_that_goes_on_differs_in_nothing_that_counts"
REPLAYED = (
    "tests/training/test_fit_replayed.py"
    "::test_a_record_or_user_moves_its_own_steps_as_declared_and_stated[{}]"
)
SHARED = CONFIG.replace(",tiny]", "]")
DOOR = "tests/noise/test_noise_release.py::test_every_entry_has_noise_of_its_own_of_the_stated_std"

PATCHES: dict[str, dict[str, tuple[str, str, str]]] = {
    "configs/common.py": {
        "the first line of a table counts as names, whatever it holds": (
            '{"header": config_dict.placeholder(bool),',
            '{"header": True,',
            "tests/experiments/test_reading_histories.py::test_a_table_is_read_as_the_config_says",
        ),
    },
    "configs/recommender.py": {
        "a model of a table of one's own is released three times": (
            '"num_seeds": 1 if variant == "table" else 3,',
            '"num_seeds": 3,',
            "tests/experiments/test_plans.py"
            "::test_a_config_releases_as_often_as_its_tiny_form[recommender:table,tiny]",
        ),
    },
    "dpx/_numerics.py": {
        "64-bit sums are released in 32 bits": (
            "with jax.ensure_compile_time_eval(), jax.enable_x64(True):",
            "with jax.ensure_compile_time_eval():",
            PRICE.format("transitions"),
        ),
        "a guarantee does not say that sums have 32 bits": (
            "return (_ROUNDED,) if",
            "return () if",
            "tests/test_rounded_sums.py::test_sums_of_32_bits_are_an_assumption[sketch]",
        ),
    },
    "dpx/_processes.py": {
        "processes compare the settings that both have": (
            "if (name in first, first.get(name)) != (name in other, other.get(name))",
            "if first.get(name) != other.get(name)",
            "tests/training/test_processes.py::test_settings_of_all_processes_are_compared",
        ),
    },
    "dpx/_storage.py": {
        "two processes on one folder draw two keys": (
            "os.link(partial, path)",
            "os.replace(partial, path)\n        open(partial, 'w').close()",
            "tests/runs/test_world_faults.py::test_of_two_runs_on_one_fresh_folder_both_have_one_key",
        ),
        "keys can be read by others": (
            "own = status.st_uid == os.geteuid() and not status.st_mode & 0o077",
            "own = True",
            "tests/runs/test_world_faults.py::test_links_and_open_folders_are_not_taken_for_secrets",
        ),
        "a copy of its key that a killed process left survives the training": (
            "        copy.unlink(missing_ok=True)",
            "        pass",
            "tests/training/test_resuming.py::test_a_finished_training_keeps_a_digest_and_no_key",
        ),
    },
    "dpx/_validate.py": {
        "what lies under a mask is summed": (
            "    if any(isinstance(part, np.ma.MaskedArray) for part in parts):\n",
            "    if False:\n",
            "tests/test_real_arrays.py::test_an_array_of_anything_but_real_numbers_is_named[K-masked]",
        ),
        "an error shows the words of a key": (
            'f"key of type {type(key).__name__}{shape} must be',
            'f"key={key} must be',
            "tests/test_contracts.py::test_what_is_no_key_is_named_and_no_word_of_it_is_shown",
        ),
        "keys that can be guessed pass": (
            "    if small and not _watch.watching():",
            "    if False:",
            "tests/training/test_fit_calls.py::test_keys_that_can_be_guessed_are_warned_of",
        ),
    },
    "dpx/audit/comparison.py": {
        "a replay lets a number be public in one run alone": (
            "for what in sorted(first.public.keys() ^ second.public.keys())",
            "for what in sorted(first.public.keys() ^ first.public.keys())",
            "tests/audit/test_replay_instrument.py::test_every_other_difference_is_named[public]",
        ),
        "a replay compares the first leaf of a release": (
            "else sum(map(np.sum, sums))",
            "else np.sum(sums[0])",
            "tests/audit/test_replay_instrument.py::test_all_leaves_of_a_release_count",
        ),
    },
    "dpx/audit/guessing.py": {
        "ties of an audit are broken by the coins": (
            'np.argsort(-scores, kind="stable")',
            "np.lexsort((~included, -scores))",
            "tests/audit/test_audit.py::test_ties_between_scores_are_broken_by_what_coins_do_not_know",
        ),
    },
    "dpx/audit/lower_bounds.py": {
        "an audit spends its failures twice": (
            "    failure = (1.0 - confidence) / 2\n    thresholds",
            "    failure = 1.0 - confidence\n    thresholds",
            "tests/audit/test_audit.py::test_each_of_several_bounds_has_its_share_of_the_failures",
        ),
    },
    "dpx/audit/recordings.py": {
        "a replay does not compare keys of dropout with those of noise": (
            "for seen in self.releases] + self.keys",
            "for seen in self.releases]",
            "tests/audit/test_replay_instrument.py::test_every_other_difference_is_named",
        ),
    },
    "dpx/audit/replay.py": {
        "of two results whose paths print alike a replay sees one": (
            "while name in leaves:",
            "while not name:",
            "tests/audit/test_replay_instrument.py::test_every_other_difference_is_named",
        ),
        "a replay takes two public numbers of one name for one": (
            "if not np.array_equal(known, value):",
            "if known is None:",
            "tests/audit/test_replay_instrument.py::test_a_public_name_stands_for_one_value",
        ),
        "a replay compares tables by what they print": (
            "pickler.dump(leaf)",
            "pickled.write(str(leaf).encode())",
            "tests/audit/test_replay_instrument.py::test_what_is_returned_is_compared_by_its_content",
        ),
        "a replay prices gradients by the sample of another training": (
            "self.recording.mixed |= self._batches > 0",
            "self.recording.mixed = False",
            "tests/audit/test_replay_instrument.py::test_each_gradient_is_priced_by_its_own_sample",
        ),
    },
    "dpx/audit/steps.py": {
        "an audit of steps takes the spread that it saw for the largest that there may be": (
            "std * math.sqrt(degrees / stats.chi2.ppf(failure, degrees))",
            "std",
            "tests/audit/test_audit.py::test_each_of_several_bounds_has_its_share_of_the_failures",
        ),
    },
    "dpx/clipping/batches.py": {
        "the sums of a batch without a finite gradient are not zero": (
            "(~keep.any(), sums)",
            "(~mask.any(), sums)",
            "tests/clipping/test_clipping.py::test_where_no_gradient_is_finite_the_sums_are_zero",
        ),
        "no other example stands in for one without a finite gradient": (
            "once(_filled(batch, keep), keep)",
            "once(batch, keep)",
            "tests/clipping/test_clipping.py::test_non_finite_examples_add_nothing",
        ),
        "the last microbatch of each block is not added up": (
            "last = jnp.minimum(first + BLOCK, count)",
            "last = jnp.minimum(first + BLOCK - 1, count)",
            "tests/clipping/test_clipping.py::test_more_microbatches_than_are_added_up_plainly",
        ),
        "sums over microbatches forget what they rounded off": (
            "return total.result(), *rows",
            "return total.high, *rows",
            "tests/clipping/test_clipping_bound.py::test_microbatches_keep_what_is_rounded_off",
        ),
        "the last example fills up the last microbatch, and counts": (
            "mask = jnp.pad(mask, (0, padding)).reshape",
            'mask = jnp.pad(mask, (0, padding), mode="edge").reshape',
            "tests/clipping/test_clipping.py::test_matches_the_closed_form",
        ),
        "an example is finite if any group of it is": (
            "jnp.isfinite(jnp.stack(of_examples[0])).all(0)",
            "jnp.isfinite(jnp.stack(of_examples[0])).any(0)",
            "tests/clipping/test_clipping.py::test_one_non_finite_group_silences_the_whole_example",
        ),
        "an example without a finite gradient shows the norm and loss of its stand-in": (
            "of_examples = jax.tree.map(functools.partial(_where, keep), of_examples, before)\n            ",
            "",
            "tests/clipping/test_clipping.py::test_matches_the_closed_form",
        ),
    },
    "dpx/clipping/clipped.py": {
        "masked examples add their gradients": (
            "_groups.clip_factors(groups, norms, keep, self.normalize)",
            "_groups.clip_factors(groups, norms, ~keep | keep, self.normalize)",
            "tests/training/test_training.py::test_pieces_sum_to_the_clipped_gradients_over_the_expected_size",
        ),
        "every group of parameters gets the whole threshold for free": (
            "moved * math.hypot(*_groups.check_clip(self.l2_clip_norm))",
            "moved * max(_groups.check_clip(self.l2_clip_norm))",
            "tests/clipping/test_clipping.py::test_groups_are_clipped_on_their_own "
            "tests/clipping/test_clipping.py::test_sensitivity_by_relation "
            "tests/clipping/test_clipping.py::test_sensitivity_is_attained_and_never_exceeded",
        ),
        "replacing a record costs what removing one does": (
            "moved = 2 if",
            "moved = 1 if",
            "tests/clipping/test_clipping.py::test_sensitivity_by_relation",
        ),
        "normalized sums are in the unit of the first group": (
            "_groups.unit_of(groups.clips[i]) for i in groups.members",
            "_groups.unit_of(groups.clips[0]) for _ in groups.members",
            "tests/clipping/test_clipping.py::test_groups_are_clipped_on_their_own",
        ),
        "a sum rounds like the parameter that rounds least": (
            "share = max(form.rounding(step, dtype)",
            "share = min(form.rounding(step, dtype)",
            "tests/clipping/test_clipping_bound.py::test_a_sum_rounds_as_its_products_of_factors_do",
        ),
        "sums of parameters in 32 and in 64 bits round like those in 64": (
            "        dtype = jnp.float32 if any(p.dtype != dtype for p in parameters.leaves) else dtype\n",
            "",
            "tests/clipping/test_clipping_bound.py::test_a_sum_rounds_as_its_narrowest_parameters_do",
        ),
        "the sum over a batch is taken to round half as much": (
            "return 2 * batch_size * (share",
            "return batch_size * (share",
            "tests/clipping/test_clipping_bound.py::test_the_sum_of_a_batch_rounds_as_often_as_it_has_examples",
        ),
        "the bound on a sum's rounding forgets that the sums of devices are added up": (
            "gamma(_batches.BLOCK + devices, dtype)",
            "gamma(_batches.BLOCK + 1, dtype)",
            "tests/clipping/test_clipping_bound.py::test_the_crafted_order_moves_a_plain_sum",
        ),
    },
    "dpx/clipping/explain.py": {
        "the microbatch that is explained is that of another method": (
            'plan.forms(reader, "auto"), leaves',
            "plan.forms(reader), leaves",
            "tests/clipping/test_clipping_costs.py::test_the_bytes_of_an_example_are_those_of_the_method_that_is_the_default",
        ),
        "uses of a parameter that split its axes differently are said to have no rule": (
            "if len(form.unruled) > 1:",
            "if len(set(form.unruled)) > 1:",
            "tests/clipping/test_clipping_silent.py"
            "::test_a_fallback_of_a_large_parameter_is_an_error_in_a_strict_call"
            "[uses that split axes differently]",
        ),
    },
    "dpx/clipping/gradients/convolution.py": {
        "a convolution moves in all directions as in the first": (
            "at[i] * strides[i], span",
            "at[i] * strides[0], span",
            "tests/clipping/test_clipping_exact.py"
            "::test_each_direction_has_a_stride_and_a_dilation_of_its_own",
        ),
        "groups of a batch lie within its examples": (
            "(group, batch) if batch_groups > 1 else (batch, group)",
            "(batch, group)",
            "tests/clipping/test_clipping_exact.py"
            "::test_each_direction_has_a_stride_and_a_dilation_of_its_own",
        ),
    },
    "dpx/clipping/gradients/entries.py": {
        "rows at every second place are taken for consecutive ones": (
            "low + (inner + 1) * jnp.arange",
            "low + jnp.arange",
            PROGRAM.format("used: rows at a distance-one_pass"),
        ),
        "a start of consecutive rows is read in 32 bits with a sign": (
            "lax.dynamic_slice(every, (start,)",
            "lax.dynamic_slice(every, (jnp.asarray(start, jnp.int32),)",
            "tests/clipping/test_clipping_exact.py::test_consecutive_rows_that_begin_too_late_or_too_early_are_the_last_or_the_first",
        ),
        "a start of consecutive rows counts from the end twice": (
            ", allow_negative_indices=False",
            "",
            "tests/clipping/test_clipping_exact.py::test_consecutive_rows_that_begin_too_late_or_too_early_are_the_last_or_the_first",
        ),
        "consecutive entries of any axis begin where rows would": (
            "reader.value(starts[axis])",
            "reader.value(starts[0])",
            "tests/clipping/test_clipping_backwards.py"
            "::test_what_is_read_adds_up_to_the_gradient[dynamic_update_slice of a column]",
        ),
        "an index beyond the table that is clipped counts for nothing": (
            'clips = eqn.params["mode"] == lax.GatherScatterMode.CLIP',
            "clips = False",
            EXACT.format("indices out of range: clip-one_pass"),
        ),
        "the last of 256 rows counts as the first": (
            "jnp.arange(count, dtype=jnp.int32)",
            "jnp.arange(count, dtype=jnp.int32) % 255",
            "tests/clipping/test_clipping_exact.py::test_the_first_byte_and_the_last_do_not_cancel",
        ),
        "an index beyond the last row counts for the first": (
            "fill_value=count",
            "fill_value=0",
            EXACT.format("tables: of_each_table-one_pass"),
        ),
    },
    "dpx/clipping/gradients/factors.py": {
        "the rows of several tables are added to the first": (
            "block = jnp.arange(k)[None, :, None]",
            "block = jnp.zeros(k, int)[None, :, None]",
            EXACT.format("tables: of_each_table-one_pass"),
        ),
        "the sums of products are not clipped": (
            "_products(scale * small.astype(dtype), large, fast)",
            "_products(small.astype(dtype), large, fast)",
            PROGRAM.format("used: tied-one_pass"),
        ),
        "of factors that are normed together only the first are in the norm": (
            "for each in (self, *more)))",
            "for each in (self,)))",
            "tests/clipping/test_clipping.py::test_groups_of_many_parameters_are_exact[alike-None]",
        ),
        "matrix units round factors that are read in full elsewhere": (
            "        if fast[-1]:\n",
            "        if False:\n",
            "tests/clipping/test_clipping_narrow.py::test_matrix_units_multiply_numbers_of_11_bits",
        ),
        "products that cancel round no more than others": (
            "gamma(terms, dtype) / gram.FLOOR",
            "gamma(terms, dtype)",
            "tests/clipping/test_clipping_bound.py::test_a_sum_rounds_as_its_products_of_factors_do",
        ),
        "factors of 32 bits are bounded as if they had 64": (
            "jnp.float64 in (left.dtype, right.dtype)",
            "False",
            "tests/clipping/test_clipping_bound.py::test_inputs_in_32_bits_and_parameters_in_64_are_bounded_in_64",
        ),
        "matrix units multiply what is rounded to bfloat16 once": (
            "return _product(rest.astype(dtype), b, fast) + _product(most.astype(dtype), b, fast)",
            "return _product(most.astype(dtype), b, fast)",
            "tests/clipping/test_clipping_narrow.py::test_matrix_units_multiply_bfloat16_numbers",
        ),
        "what a weight is multiplied by is forgotten": (
            "        if number != 1:\n",
            "        if False:\n",
            "tests/clipping/test_clipping_backwards.py::test_a_limit_in_the_backward_pass_holds_before_the_gain_of_the_weight[0.25]",
        ),
    },
    "dpx/clipping/gradients/forms.py": {
        "only the first part of a parameter is normed": (
            "jnp.stack([form.squared_norm(values) for *_, form in self.parts])",
            "jnp.stack([form.squared_norm(values) for *_, form in self.parts[:1]])",
            PARTS.format("blocks-auto"),
        ),
        "the parts of a parameter are put back where others were": (
            "at = first + length",
            "at = first",
            PARTS.format("blocks-auto"),
        ),
        "short gradients of several groups are normed as one": (
            "joined.setdefault((group, ",
            "joined.setdefault((0, ",
            "tests/clipping/test_clipping.py::test_groups_of_many_parameters_are_exact[many_small-None]",
        ),
        "of short gradients that are one array the first is not in the norm": (
            "jnp.concatenate([*each])",
            "jnp.concatenate([*each][1:])",
            "tests/clipping/test_clipping.py::test_groups_of_many_parameters_are_exact[many_small-None]",
        ),
        "a stack rounds like the part of it that rounds least": (
            "return max(form.rounding(size, dtype) for *_",
            "return min(form.rounding(size, dtype) for *_",
            "tests/clipping/test_clipping_bound.py::test_a_stack_rounds_as_the_part_of_it_that_rounds_most",
        ),
        "the norm of a stack of blocks is that of its first": (
            "return total(values[self.norm])",
            "return total(values[self.norm].reshape(-1)[:1])",
            BLOCKS.format("scan-two_pass"),
        ),
        "norms that a scan adds up are not rounded up": (
            "return jnp.sum(parts) * (1 + 1.01 * gamma(parts.size + 2, parts.dtype))",
            "return jnp.sum(parts)",
            "tests/clipping/test_clipping_blocks.py::test_norms_that_a_scan_adds_up_are_rounded_up_for_each_of_its_iterations",
        ),
    },
    "dpx/clipping/gradients/gram.py": {
        "the cross term of a shared parameter counts once": (
            "total += (1 if s == t else 2) *",
            "total += 1 *",
            EXACT.format("a_tied_embedding_read_at_the_last_position-one_pass"),
        ),
        "the cross term of a shared parameter is forgotten": (
            "total += (1 if s == t else 2) *",
            "total += (s == t) *",
            EXACT.format("a_tied_embedding-one_pass"),
        ),
        "what is looked up has an exact norm": (
            "scaled.append((of_rows, of_columns))",
            "scaled.append((of_rows, of_columns * (left.dtype != bool)))",
            "tests/clipping/test_clipping_bound.py::test_inner_products_of_rows_that_are_looked_up_round_too",
        ),
        "blocks that are normed together are bounded as if they were one row of positions": (
            "    length = SLACK * jnp.sqrt(jnp.sum(jnp.square(all_lengths)))\n",
            "    length = SLACK * jnp.max(all_lengths)\n",
            "tests/clipping/test_clipping_bound.py::test_the_bound_of_several_that_are_alike_is_that_of_each",
        ),
        "a sum is put back in the wrong order of axes": (
            ".transpose([order.index(i) for i in sorted(order)])",
            ".transpose(order)",
            EXACT.format("scaled_between_cyclic_transposes-one_pass"),
        ),
        "look-ups that find no row of a weight count in its norm": (
            "return squares.astype(jnp.float32), None",
            "return jnp.ones(squares.shape), None",
            EXACT.format("a_few_rows_that_are_added_to_a_frozen_table-one_pass"),
        ),
        "the positions of the last use alone round": (
            "roundings += columns.shape[-1] + 1",
            "roundings = columns.shape[-1] + 1",
            "tests/clipping/test_clipping_bound.py::test_positions_of_all_uses_round",
        ),
        "inner products of long rows end at the last whole chunk": (
            "range(whole * length, max(size, 1), CHUNK)",
            "range(whole * length, max(size - CHUNK + 1, 1), CHUNK)",
            "tests/clipping/test_clipping_bound.py::test_no_example_adds_more_than_the_threshold[wide]",
        ),
        "a gradient whose terms cancel has no length": (
            "jnp.maximum(total, jnp.square(FLOOR * length))",
            "jnp.maximum(total, 0)",
            "tests/clipping/test_clipping_bound.py::test_terms_that_cancel_leave_some_of_their_length",
        ),
        "inner products of two terms are rounded if those of either may be": (
            "shared.fast[s] and shared.fast[t]",
            "shared.fast[s] or shared.fast[t]",
            "tests/clipping/test_clipping_narrow.py::test_a_product_of_two_terms_rounds_what_either_of_them_would_not",
        ),
        "rows whose squares are flushed have no length": (
            "bounds = jnp.sqrt(SLACK * squares) + flushed",
            "bounds = jnp.sqrt(SLACK * squares)",
            "tests/clipping/test_clipping_bound.py::test_rows_whose_squares_are_flushed_have_a_length",
        ),
        "norms forget what the sum over positions rounds": (
            "norm + rounding.gamma(roundings, total.dtype) * length",
            "norm",
            "tests/clipping/test_clipping_bound.py::test_what_the_sum_over_positions_rounds_is_in_the_norm",
        ),
    },
    "dpx/clipping/gradients/outer.py": {
        "the weight of the other adapter is forgotten where both are merged": (
            "x, y, wide = x.astype(dtype), y.reshape(shape).astype(dtype), accumulator(dtype)",
            "x, y, wide = x.astype(dtype), jnp.ones(shape, dtype), accumulator(dtype)",
            EXACT.format("merged_twice-one_pass"),
        ),
        "a scale along an axis of a weight is forgotten": (
            "x, factor.axes, y, mine, of_result",
            "x, factor.axes, jnp.ones_like(y), mine, of_result",
            PROGRAM.format("rows scaled, multiplied-one_pass"),
        ),
        "a product that a loop adds up counts once": (
            "term = term._replace(gain=term.gain * self.sizes[label])",
            "pass",
            "tests/clipping/test_clipping_backwards.py::test_a_loop_adds_to_what_it_begins_with",
        ),
        "rows that are cut out of a table count for its first": (
            "np.full(self.sizes[old] + 1, size, np.int32)",
            "np.zeros(self.sizes[old] + 1, np.int32)",
            EXACT.format("rows_of_a_table_that_are_no_parameters-one_pass"),
        ),
        "numbers of rows along two axes are taken for those along one": (
            "if not moves or self.indexed != (old,):",
            "if not moves:",
            "tests/clipping/test_clipping_exact.py"
            "::test_the_rules_of_parameters_are_explained[tables: by_two_indices_of_parts_that_overlap]",
        ),
    },
    "dpx/clipping/gradients/plan.py": {
        "a parameter that is cut along two axes is cut along one": (
            "if len({axis for axis, *_ in pieces}) != 1:",
            "if not pieces:",
            PARTS.format("along_either_axis-auto"),
        ),
        "parts with zeros between their rows are taken for consecutive rows": (
            "min(config[axes[0]]) < 0 or config[axes[0]][2]:",
            "min(config[axes[0]]) < 0:",
            PARTS.format("every_other_block-auto"),
        ),
        "a part that a block makes again loses the number that multiplies it": (
            "if gain == 1 and (inside",
            "if (inside",
            PARTS.format("scaled_before_blocks-two_pass"),
        ),
        "what is broadcast behind a block is as long as within it": (
            " or operand.aval.size != var.aval.size",
            "",
            BLOCKS.format("summed behind-two_pass"),
        ),
        "derivatives that are written by hand are not read for what mixes examples": (
            "mixing.check(traced, ",
            "mixing.check(jax.make_jaxpr(loss)(list(leaves), example), ",
            VOIDS.format("collective in backward, plain-auto"),
        ),
    },
    "dpx/clipping/gradients/primitives.py": {
        "the factors of a product are those of its transpose": (
            "term._replace(axes=tuple(term.axes[i] for i in order))",
            "term._replace(axes=tuple(term.axes))",
            PROGRAM.format("used: in integers-one_pass"),
        ),
        "of a sum of products the first alone counts": (
            "return [*first, *(term._replace(gain=sign * term.gain) for term in second)]",
            "return [*first] or [*second]",
            "tests/clipping/test_clipping_backwards.py::test_what_is_read_adds_up_to_the_gradient[add_any]",
        ),
        "a reshape leaves the axes in their order": (
            'eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None',
            "True",
            "tests/clipping/test_clipping_backwards.py"
            "::test_what_is_no_sum_of_products_is_held_and_exact[reshaped from its last axis on]",
        ),
        "what the sum of a loop begins with is dropped": (
            "return [*start, *added]",
            "return added",
            "tests/clipping/test_clipping_backwards.py::test_a_loop_adds_to_what_it_begins_with",
        ),
    },
    "dpx/clipping/gradients/reading.py": {
        "sums of which one term is zero count as zero": (
            "name in _ZERO_IF and all(needed)",
            "name in _ZERO_IF and any(needed)",
            "tests/clipping/test_clipping_backwards.py::test_what_is_no_sum_of_products_is_held_and_exact",
        ),
        "a cotangent that is the same for all entries counts as zero": (
            "else name in _ZERO_IF and",
            'else name == "broadcast_in_dim" or name in _ZERO_IF and',
            "tests/clipping/test_clipping_backwards.py::test_only_a_cotangent_of_zeros_counts_for_nothing",
        ),
        "convolutions in a loop or a block are left to XLA, which mixes up the examples of a sharded batch": (
            "            return self._enter(eqn, values, (), False)",
            "            pass",
            WITHIN,
        ),
        "convolutions in a branch are left to XLA, which mixes up the examples of a sharded batch": (
            "if not (inner := self.body(eqn, body)).convolves:",
            "if inner := self.body(eqn, body):",
            WITHIN,
        ),
        "convolutions of what a loop carries from a constant on are left to XLA, which mixes up examples": (
            "        used = jaxprs.walked(self.jaxpr, own, ever=True)\n",
            "        used = jaxprs.walked(self.jaxpr, own)\n",
            WITHIN,
        ),
        "what a loop carries counts as what it began with": (
            "core.Literal) and not first <= at < last:",
            "core.Literal):",
            EXACT.format("a_carry_that_starts_as_a_weight-one_pass"),
        ),
        "a loop that doubles what it carries only adds to it": (
            "users[0].invars.count(var) != 1 or var in",
            "var in",
            "tests/clipping/test_clipping_backwards.py::test_a_loop_adds_to_what_it_begins_with",
        ),
        "what a loop hands out of its sum so far begins at zero": (
            " or var in self.jaxpr.outvars:",
            ":",
            EXACT.format("updated_after_every_step-one_pass"),
        ),
        "what else reads the sum of a loop reads each term of it": (
            "if result in read or self.jaxpr.outvars.count(result) != 1:",
            "if False:",
            EXACT.format("updated_in_every_step-one_pass"),
        ),
        "a look-up in zeros finds zeros alone": (
            'eqn.params["fill_value"] != 0',
            "False",
            EXACT.format("a_look_up_in_zeros_that_fills_in_a_number-one_pass"),
        ),
        "convolutions of values of one example are left to a compiler that has them wrong": (
            "if self.shared.isdisjoint(eqn.invars):",
            "if False:",
            "tests/clipping/test_clipping_meshes.py"
            "::test_kernels_of_examples_own_are_convolved_rightly_where_the_batch_is_sharded",
        ),
        "what a loss writes to a mutable array is dropped": (
            "if eqn.effects or not needed.isdisjoint(results):",
            "if not needed.isdisjoint(results):",
            PROGRAM.format("used: written to an array-two_pass"),
        ),
        "what a loss rounds on purpose is not rounded": (
            'if (given["exponent_bits"], given["mantissa_bits"]) == (kind.nexp, kind.nmant):',
            'if given["exponent_bits"] == kind.nexp:',
            "tests/clipping/test_clipping_backwards.py"
            "::test_what_is_read_adds_up_to_the_gradient[reduce_precision of the example]",
        ),
    },
    "dpx/clipping/groups.py": {
        "the sum of squares of many parameters is taken for exact": (
            "gamma(len(squares) + 24, x.dtype)",
            "gamma(24, x.dtype)",
            "tests/clipping/test_clipping_bound.py::test_norms_of_groups_are_above_the_root_of_their_sum",
        ),
        "a clip factor in 64 bits scales a gradient in 32 as if that rounded nothing": (
            "slack = max(gamma(len(squares) + 24, x.dtype) for x in mine)",
            "slack = min(gamma(len(squares) + 24, x.dtype) for x in mine)",
            "tests/clipping/test_clipping_bound.py::test_norms_of_groups_of_two_types_are_raised_by_what_the_narrower_rounds",
        ),
        "gradients far above the threshold are clipped half": (
            "length = jnp.maximum(norm, clip)",
            "length = jnp.maximum(jnp.sqrt(norm * clip), clip)",
            MOVED,
        ),
        "groups count the parameters of those before them": (
            "if group == index]",
            "if group <= index]",
            "tests/clipping/test_clipping.py::test_groups_are_clipped_on_their_own",
        ),
        "normalizing factors above 1 make a cotangent infinite": (
            "max(clip / NORMALIZE_GAMMA, 1.0)",
            "1.0",
            "tests/clipping/test_clipping.py::test_a_normalized_example_cannot_make_the_sum_infinite",
        ),
        "clip factors that flush a gradient are used": (
            "counts = keep & (length <= clip / SMALLEST)",
            "counts = keep",
            "tests/clipping/test_clipping_bound.py::test_clip_factors_too_small_to_scale_by_are_zero",
        ),
    },
    "dpx/clipping/jaxprs.py": {
        "the condition of a loop may read other examples": (
            'ends = follow(params["cond_jaxpr"].jaxpr, [*given[:consts], *results], axes)',
            "ends = ()",
            VOIDS.format("collective: in a condition-auto"),
        ),
        "what a loop carries that an example ends is the same for all": (
            "if ever and any(ends):",
            "if False:",
            BY_PLACE,
        ),
        "what a branch is given that an example chooses is the same for all": (
            'if count != len(flags) or (ever and name == "cond" and given[0]):',
            "if count != len(flags):",
            BY_PLACE,
        ),
        "what is called twice is what it was the last time": (
            "results = [core.Var(v.aval) for v in eqn.outvars]",
            "results = eqn.outvars",
            EXACT.format("what_is_called_twice-one_pass"),
        ),
        "loops that are evaluated again always run forwards": (
            '("length", "reverse", "unroll")',
            '("length", "unroll")',
            BLOCKS.format("scan-two_pass"),
        ),
        "a number over a gradient counts as a multiple of it": (
            "(not number or isinstance(eqn.invars[0], core.Literal))",
            "not number",
            "tests/clipping/test_clipping_backwards.py"
            "::test_only_a_cotangent_of_zeros_counts_for_nothing[a number over it]",
        ),
        "a gradient in reverse order is as the program made it": (
            'PLAIN = ("copy", "copy_p", "name",',
            'PLAIN = ("copy", "copy_p", "name", "rev",',
            "tests/clipping/test_clipping_backwards.py"
            "::test_what_is_no_sum_of_products_is_held_and_exact[reversed]",
        ),
        "a product is exact if one of its factors is": (
            "return all(each in (Prec",
            "return any(each in (Prec",
            "tests/clipping/test_clipping_narrow.py::test_a_product_is_exact_if_both_of_its_factors_are",
        ),
        "a block is taken for one that is gone, in whose place in memory it is": (
            "(key := (jaxpr, axes, *own))",
            "(key := (id(jaxpr), axes, *own))",
            VOIDS.format("collective in backward, in the first of many blocks-auto"),
        ),
        "what a loop carries at first is taken for what it carries later": (
            "            if merged == carry:\n",
            "            if True:\n",
            MAY_VOID.format("own key, replaced in a scan-auto"),
        ),
    },
    "dpx/clipping/losses.py": {
        "a record has the same key in every step": (
            "    key = jax.random.fold_in(key, step)\n",
            "",
            "tests/clipping/test_clipping_randomness.py::test_a_record_keeps_its_key_wherever_it_stands",
        ),
        "the key of a record depends on its place in the batch": (
            "    if is_by_record(dtype):\n",
            "    if True:\n",
            "tests/clipping/test_clipping_randomness.py"
            "::test_a_record_keeps_its_key_in_every_implementation",
        ),
    },
    "dpx/clipping/meshes.py": {
        "gradients of different devices are added up before they are clipped": (
            "leaves, batch, mask = vary((leaves, batch, mask), axes)",
            "batch, mask = vary((batch, mask), axes)",
            "tests/clipping/test_clipping_meshes.py::test_sums_are_those_of_one_device_and_of_per_example_gradients",
        ),
    },
    "dpx/clipping/mixing.py": {
        "a batch with a missing value is not recognised": (
            "return np.array_equal(a, b, equal_nan=True)",
            "return np.array_equal(a, b)",
            VOIDS.format("batch, itself-auto"),
        ),
        "what a compiled function within the loss closes over is not looked at": (
            "for each in jaxprs.inside(eqn)]",
            "for each in jaxprs.inside(eqn) if eqn.primitive.name not in jaxprs.CALLS]",
            VOIDS.format("batch, JAX, in both-auto"),
        ),
        "a mutable array carries values from one example to the next": (
            "if any(isinstance(constant, jax.Ref) for constant in constants):",
            "if False:",
            VOIDS.format("what one example leaves for the next-auto"),
        ),
        "a moving average of examples is not refused": (
            "made - _averages(jaxprs.walked(live()[0], own))",
            "False",
            VOIDS.format("average: linen-auto"),
        ),
        "a collective over other examples is not refused": (
            "if isinstance(axis, str) and axis not in own_axes and name not in jaxprs.LAYOUT:",
            "if False:",
            VOIDS.format("collective: pmean-auto"),
        ),
        "a loss may close over its batch": (
            "any(_same(constant, leaf) for leaf in call.private)",
            "False",
            VOIDS.format("batch, NumPy, 2-auto"),
        ),
        "a batching rule that is given all examples is not reported": (
            'if name == "custom_vmap_call" and not _is_of_jax(eqn.params["rule"]):',
            "if False:",
            MAY_VOID.format("batching rule-auto"),
        ),
        "a primitive of somebody else's is taken for one of JAX": (
            "if rule is not None and not _is_of_jax(rule):",
            "if False:",
            MAY_VOID.format("own primitive-auto"),
        ),
        "keys that are drawn from by place are not refused": (
            "draws = is_vectorised and any(",
            "draws = False and any(",
            "tests/clipping/test_clipping_silent.py::test_keys_that_jax_draws_from_by_place_are_refused",
        ),
        "draws by rejection from keys by place are not refused": (
            '"random_fold_in", "random_gamma", "random_split"',
            '"random_fold_in", "random_split"',
            "tests/clipping/test_clipping_silent.py::test_keys_that_jax_draws_from_by_place_are_refused",
        ),
        "keys that a loop draws from by place after its first step are not refused": (
            "    ever = jaxprs.walked(jaxpr, own, ever=True) if draws else ()\n",
            "    ever = used\n",
            "tests/clipping/test_clipping_silent.py::test_keys_that_jax_draws_from_by_place_are_refused",
        ),
    },
    "dpx/clipping/params.py": {
        "running statistics of a module are trained": (
            "if isinstance(wrt, type) else nnx.Param\n",
            "if isinstance(wrt, type) else nnx.Variable\n",
            "tests/clipping/test_clipping_models.py::test_a_filter_sees_the_params_of_a_module_and_a_type_names_any_variable",
        ),
        "complex parameters are not refused": (
            "if jnp.issubdtype(leaf.dtype, jnp.complexfloating):",
            "if False:",
            "tests/clipping/test_clipping.py::test_complex_parameters_are_refused",
        ),
        "the first of a list has no number by which it is trained or not": (
            "(name for name in names if name is not None)",
            "(name for name in names if name)",
            "tests/clipping/test_clipping_models.py::test_leaves_of_a_list_are_chosen_by_their_number",
        ),
        "an optimizer's state is trained with the parameters": (
            "    if wrt is None:\n        _refuse_holders(params)\n",
            "",
            REFUSED,
        ),
    },
    "dpx/clipping/passes.py": {
        "what blocks make again is scaled by the clip factors of another parameter": (
            "own = {w: weights[group] for",
            "own = {w: weights[0] for",
            "tests/clipping/test_clipping_blocks.py::test_groups_masks_frozen_parameters_and_aux_at_once",
        ),
        "gradients are summed with the clip factors of another group": (
            "form.weighted_sum(have, weights[group], leaf.shape)",
            "form.weighted_sum(have, weights[0], leaf.shape)",
            "tests/clipping/test_clipping.py::test_groups_of_many_parameters_are_exact[many_small-None]",
        ),
        "what blocks make again is not clipped": (
            "within.sums.weighted_sum(handed, of_examples, shape)",
            "within.sums.weighted_sum(handed, 0 * of_examples + 1, shape)",
            "tests/clipping/test_clipping_backwards.py::test_blocks_whose_derivatives_are_linear_or_not_are_exact[quotient]",
        ),
        "what blocks make again is rounded where a compiler likes": (
            "return results[: last - first], settled(handed)",
            "return results[: last - first], handed",
            "tests/clipping/test_clipping_narrow.py::test_what_blocks_make_again_for_sums_is_rounded_as_it_was_for_norms",
        ),
        "blocks are made again where the first group has a clip factor": (
            "jnp.any(jnp.stack([jnp.any(w > 0) for w in weights]))",
            "jnp.any(weights[0] > 0)",
            "tests/clipping/test_clipping_blocks.py::test_a_group_that_is_too_long_to_be_scaled_silences_no_other",
        ),
        "what blocks make again is rounded like narrow parameters": (
            'if eqn.primitive.name != "convert_element_type":',
            "if True:",
            "tests/clipping/test_clipping_blocks.py::test_sums_of_narrow_parameters_are_not_rounded",
        ),
    },
    "dpx/clipping/reports.py": {
        "the records that a batch is taken from are not private": (
            "[*jax.tree.leaves(batch), *everything]",
            "jax.tree.leaves(batch)",
            "tests/clipping/test_clipping_silent.py::test_records_that_batches_are_taken_from_are_no_constants_of_a_loss",
        ),
        "parameters that no gradient reaches get noise without a word": (
            "    if (current := call()) is None or not any(zero):",
            "    if (current := call()) or True:",
            "tests/training/test_fit_calls.py::test_what_no_gradient_reaches_is_named_by_the_names_of_the_caller",
        ),
    },
    "dpx/clipping/rounding.py": {
        "norms are not rounded up": (
            "return share / (1 - share) if share < 1 else math.inf",
            "return 1e-30",
            "tests/clipping/test_clipping_bound.py::test_no_example_adds_more_than_the_threshold",
        ),
        "narrow activations are not rounded where they are held": (
            "return jax.tree.map(each, lax.optimization_barrier(tree))",
            "return tree",
            "tests/clipping/test_clipping_bound.py::test_narrow_activations_add_no_more_than_the_threshold",
        ),
        "a sum over pieces is a plain running sum": (
            "lost.append(before + ((a - (rounded - taken)) + (x - taken)))",
            "lost.append(before)",
            "tests/clipping/test_clipping_bound.py::test_a_running_sum_keeps_what_is_rounded_off",
        ),
        "the sum of sums of chunks does not round": (
            "+ (chunks if chunks > 1 else 0)",
            "",
            "tests/clipping/test_clipping_bound.py::test_a_product_rounds_and_so_does_every_sum_of_chunks",
        ),
        "numbers for TensorFloat-32 keep a bit too many": (
            "lax.reduce_precision(x, 8, 10)",
            "lax.reduce_precision(x, 8, 11)",
            "tests/clipping/test_clipping_narrow.py::test_matrix_units_multiply_numbers_of_11_bits",
        ),
        "of several axes only the longest rounds": (
            "        roundings += last\n",
            "        roundings = max(roundings, last)\n",
            "tests/clipping/test_clipping_bound.py::test_every_axis_that_is_added_up_rounds",
        ),
    },
    "dpx/clipping/xla_cpu.py": {
        "both of two equal rows are added up": (
            "return lax.index_in_dim(product, 0, keepdims=False).reshape",
            "return product.sum(0).reshape",
            "tests/clipping/test_clipping.py::test_matches_the_closed_form",
        ),
    },
    "dpx/cross_attention/__init__.py": {
        "the choice of a memory's features looks at the keys": (
            "declared, features = _best(declared, n, multiplier, scale is None, chosen)",
            "declared, features = _best(\n"
            "                declared, max(1, int(np.any(K, axis=-1).sum())), multiplier, "
            "scale is None, chosen\n"
            "            )",
            "tests/cross_attention/test_expected.py::test_the_choice_looks_at_no_key_and_no_value",
        ),
        "the choice of a memory's features looks at the private number of rows": (
            "n = np.shape(K)[-2] if declared.public_count else expected_records",
            "n = max(1, np.shape(K)[-2])",
            "tests/cross_attention/test_expected.py"
            "::test_the_number_of_rows_decides_nothing_where_it_is_private",
        ),
    },
    "dpx/cross_attention/baselines.py": {
        "a memory with leading axes has the noise of a matrix": (
            "if np.ndim(array) != 2:",
            "if False:",
            "tests/cross_attention/test_unfit_memories.py::test_the_mean_of_values_has_one_matrix",
        ),
        "the mean of V has half its sensitivity": (
            "sensitivity=2 * domain.value_norm / n,",
            "sensitivity=domain.value_norm / n,",
            REPLACED.format("mean of V"),
        ),
        "fresh noise pays for one query": (
            "change = math.sqrt(count) * 2 * bounds.value_norm * largest_weight",
            "change = 2 * bounds.value_norm * largest_weight",
            REPLACED.format("fresh noise"),
        ),
    },
    "dpx/cross_attention/domain.py": {
        "values in a ball are clipped entry by entry": (
            "return into_ball(v, self.value_bound, xp=xp)",
            "return xp.clip(v, -self.value_bound, self.value_bound)",
            "tests/cross_attention/test_cross_attention_privacy.py"
            "::test_a_release_moves_by_no_more_than_the_sensitivity_whatever_a_row_holds",
        ),
        "values outside the simplex have the noise of labels": (
            "            return into_simplex(v, self.value_bound, xp)\n",
            "            return v\n",
            REMOVED.format("sketch, add or remove, simplex"),
        ),
        "rows of the sketch are not clipped on entering": (
            "k = xp.clip(k, 0, self.key_bound) if box else into_ball(k, self.key_bound, xp=xp)",
            "k = xp.asarray(k)",
            REPLACED.format("sketch, traced"),
        ),
        "values are not clipped on entering": (
            "v = self.nearest_values(v, xp)",
            "v = xp.asarray(v)",
            REPLACED.format("sketch, traced"),
        ),
        "rows are clipped by a program whose last bits depend on the number of rows": (
            "xp: Any = jnp if is_traced(k, v) else np",
            "xp: Any = jnp",
            "tests/cross_attention/test_cross_attention_privacy.py"
            "::test_a_row_enters_with_the_same_bits_whatever_the_number_of_rows[ball]",
        ),
        "a memory is wider than the domain that its noise is for": (
            "if widths != [self.dim, self.value_dim]:",
            "if False:",
            "tests/cross_attention/test_unfit_memories.py::test_a_domain_is_that_of_the_memory",
        ),
    },
    "dpx/cross_attention/sketch/expected.py": {
        "the expected error of several heads is that of one": (
            "multiplier = math.sqrt(num_heads) * gaussian_noise_multiplier(epsilon, delta)",
            "multiplier = gaussian_noise_multiplier(epsilon, delta)",
            "tests/cross_attention/test_expected.py::test_heads_share_the_budget",
        ),
    },
    "dpx/cross_attention/sketch/memory.py": {
        "the sketch tells a private number of rows": (
            "count = n if domain.public_count else None",
            "count = n",
            "tests/cross_attention/test_cross_attention_privacy.py"
            "::test_a_private_count_is_told_by_the_noisy_mass_alone",
        ),
        "under jit every head of a sketch has the whole budget": (
            "whole, unit = whole_change(features, domain, heads), whole_unit(largest)",
            "whole, unit = whole_change(features, domain, 1), whole_unit(largest)",
            "tests/cross_attention/test_declared_noise.py::test_a_sketch_has_the_same_noise_under_jit",
        ),
        "that rows lie within their bounds is no assumption": (
            '+ (() if clip else ("data within the declared bounds",))',
            "",
            "tests/cross_attention/test_declared_noise.py::test_a_memory_says_what_it_assumes",
        ),
    },
    "dpx/cross_attention/sketch/sums.py": {
        "the sketch has noise for a row that comes or goes, not one that is replaced": (
            "return math.sqrt(heads) * (math.sqrt(2) * steps**2",
            "return math.sqrt(heads) * (steps**2",
            REPLACED.format("sketch"),
        ),
        "a row of the sketch that comes or goes has the noise of half a row": (
            "        return math.sqrt(heads) * largest_whole(features, domain)",
            "        return math.sqrt(heads) * largest_whole(features, domain) / 2",
            REMOVED.format("sketch, add or remove"),
        ),
        "the mass of the zero query is exact where the number of rows is private": (
            "if domain.public_count and isinstance(features, PolynomialFeatures):",
            "if isinstance(features, PolynomialFeatures):",
            REMOVED.format("sketch, add or remove"),
        ),
        "every head of the sketch has the whole budget": (
            "return math.sqrt(heads) * (math.sqrt(2) * steps**2",
            "return (math.sqrt(2) * steps**2",
            REPLACED.format("cross-attention layer"),
        ),
        "contributions of random features are not rescaled": (
            "weights = weights * jnp.minimum(1, largest / jnp.maximum(norms, largest / 2))[:, None]",
            "weights = weights * 1.0",
            "tests/cross_attention/test_cross_attention_privacy.py"
            "::test_random_feature_sensitivity_is_never_exceeded "
            "tests/cross_attention/test_cross_attention_privacy.py"
            "::test_random_features_that_overflow_stay_within_the_sensitivity",
        ),
        "rounding of one factor is missing in the noise of a sketch": (
            "(bounds[0] - steps) * bounds[1] + steps * (bounds[1] - steps)",
            "(bounds[0] - steps) * bounds[1]",
            "tests/cross_attention/test_declared_noise.py::test_a_sketch_covers_the_rounding_of_both_factors",
        ),
    },
    "dpx/cross_attention/trees/distances.py": {
        "a tree's noise is that of a record that comes or goes": (
            "change = 2 * weight_bound + ",
            "change = weight_bound + ",
            REPLACED.format("DPTreeDistance"),
        ),
    },
    "dpx/cross_attention/trees/leaf_sums.py": {
        "weights beyond their bound enter the leaves": (
            "rows = np.where((squares <= bound**2)[:, None], rows, 0)",
            "pass",
            "tests/cross_attention/test_declared_noise.py::test_weights_beyond_their_bound_count_as_zero",
        ),
    },
    "dpx/cross_attention/trees/memory.py": {
        "rows of trees are not clipped under jit": (
            "        K, V = domain.enter(K, V, clip=clip)\n        n, known",
            "        n, known",
            "tests/cross_attention/test_unfit_memories.py::test_trees_clip_rows_under_jit",
        ),
    },
    "dpx/cross_attention/trees/node_noise.py": {
        "every level of a Gaussian tree has the whole budget": (
            "return sensitivity * np.sqrt(depth * worst.sum() / worst)",
            "return sensitivity * np.sqrt(worst.sum() / worst)",
            "tests/cross_attention/test_tree_sums.py::test_gaussian_noise_spends_exactly_the_budget",
        ),
        "every moment of a truncated Laplace tree has the whole budget": (
            "count = depth * (power + 1) * len(ranges) * columns * copies",
            "count = depth * len(ranges) * columns * copies",
            PRICE.format("DPTreeHighDim, truncated Laplace"),
        ),
        "every column of a truncated Laplace tree has the whole budget": (
            "len(ranges) * columns * copies",
            "len(ranges) * copies",
            PRICE.format("trees, truncated Laplace"),
        ),
        "every copy of a tree has the whole budget": (
            "math.sqrt(copies) * sensitivity",
            "sensitivity",
            REPLACED.format("trees, two copies"),
        ),
        "advanced composition is bought without its slack": (
            "return advanced * (1 - 1e-9), delta / (2 * count)",
            "return advanced * (1 - 1e-9), delta / count",
            "tests/cross_attention/test_tree_sums.py::test_split_budget_composes_to_the_budget",
        ),
        "levels of trees get √2 times what advanced composition leaves them": (
            "return advanced * (1 - 1e-9), delta",
            "return advanced * math.sqrt(2), delta",
            "tests/cross_attention/test_tree_sums.py"
            "::test_split_budget_composes_to_the_budget[1.0-5000]",
        ),
        "Σ w of the paper's trees spends the whole budget": (
            "return (epsilon / 3, delta / 3), (each",
            "return (epsilon, delta / 3), (each",
            "tests/cross_attention/test_declared_noise.py"
            "::test_parts_of_the_papers_budget_compose_to_it[1.0-4-3]",
        ),
        "the paper's budget has its slack on top": (
            "epsilon / structures, delta / structures / 2, delta / structures / 2",
            "epsilon / structures, delta / structures, delta / structures / 2",
            "tests/cross_attention/test_declared_noise.py::test_parts_of_the_papers_budget_compose_to_it",
        ),
    },
    "dpx/cross_attention/trees/node_sums.py": {
        "the root of a tree is released": (
            "while len(levels[-1]) > 2:",
            "while len(levels[-1]) > 1:",
            REPLACED.format("DPTreeDistance"),
        ),
        "all trees have the same noise": (
            "(jax.random.split(key, len(leaves)), leaves, nodes)",
            "(jnp.stack([key] * len(leaves)), leaves, nodes)",
            REPLACED.format("DPTreeHighDim"),
        ),
    },
    "dpx/cross_attention/trees/structures.py": {
        "rounding is missing in the noise of trees of a memory": (
            "change = 2 * self.constant + rounding",
            "change = 2 * self.constant",
            "tests/cross_attention/test_declared_noise.py::test_gaussian_trees_of_a_memory_cover_the_rounding_of_a_row",
        ),
    },
    "dpx/data/cells.py": {
        "all events of which nothing names the user are those of one user": (
            "return value is None or value.strip() in _MISSING",
            "return value is None or not value.strip()",
            "tests/data/test_data.py::test_events_of_nobody_are_not_those_of_one_user",
        ),
        "users are the floats to which one of another type has rounded them": (
            """    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        text = str(value)""",
            """    elif isinstance(value, int | float | np.integer) and not isinstance(value, bool):
        text = str(int(value))""",
            READERS.format("events, arrays"),
        ),
        "times are the floats to which one of another type has rounded them": (
            "        if 2.0**53 <= abs(value) < np.inf:",
            "        if False:",
            READERS.format("events, columns of pandas"),
        ),
        "users of a column are all text, or all numbers": (
            "        if not _WHOLE.fullmatch(text) or len(text) > 20:",
            "        if True:",
            "tests/data/test_tables.py::test_the_same_table_has_the_same_users_in_every_format",
        ),
        "spaces around a name make two users of one": (
            'unicodedata.normalize("NFC", value.strip())',
            'unicodedata.normalize("NFC", value)',
            "tests/data/test_tables.py::test_the_same_table_has_the_same_users_in_every_format",
        ),
        "two ways of writing a letter make two users of one": (
            'text = unicodedata.normalize("NFC", value.strip())',
            "text = value.strip()",
            "tests/data/test_tables.py::test_the_same_table_has_the_same_users_in_every_format",
        ),
        "the keys of a dict are the users, each of one record": (
            "if isinstance(values, Mapping | Set):",
            "if isinstance(values, Set):",
            "tests/data/test_data.py::test_what_makes_no_histories_is_named",
        ),
        "a value that equals a user's number is that user": (
            "if type(cell) not in (int, str):",
            "if isinstance(cell, list):",
            "tests/data/test_data.py::test_what_equals_a_number_is_none",
        ),
    },
    "dpx/data/columns.py": {
        "a record is read by the header of another program": (
            "    if named is None and known not in counting:",
            "    if named is None:",
            "tests/data/test_arrays.py"
            "::test_a_first_line_that_counts_is_names_or_a_row_and_the_caller_says_which",
        ),
        "the first document decides which column is read": (
            """            found = [_of_texts(path, known) if name is None else name for name in names]
""",
            """            rows = list(rows)
            longest = max(zip(rows[0][1], known), key=lambda pair: len(pair[0]))[1]
            found = [longest if name is None else name for name in names]
""",
            "tests/data/test_newsgroups.py::test_no_document_decides_what_is_read_of_others",
        ),
        "the first document decides how many lines are header": (
            """    if texts and kind == ".tab":
        rows = _of_orange(path, rows)
""",
            """    rows = list(rows)
    typed = len(rows) > 1 and {cell.strip() for cell in rows[1][1]} <= _ORANGE_TYPES
    rows = iter(rows)
    if texts and (kind == ".tab" or typed):
        rows = _of_orange(path, rows)
""",
            "tests/data/test_newsgroups.py::test_no_document_decides_what_is_read_of_others",
        ),
        "all rows of a table choose what separates its cells": (
            "separator or files.SEPARATORS[kind]",
            'separator or max(",;|\\t", key=content.count)',
            READERS.format("table, csv"),
        ),
    },
    "dpx/data/embedding.py": {
        "documents are embedded in a product whose rounding follows from how many there are": (
            'shrunk = np.einsum("nd,de->ne", _unit(rows) - self.centre, self.directions)',
            "shrunk = (_unit(rows) - self.centre) @ self.directions",
            "tests/data/test_embedding.py::test_a_text_is_rounded_as_if_it_were_alone",
        ),
    },
    "dpx/data/files.py": {
        "a character that is no newline makes records of one person's row": (
            'io.StringIO(text, newline="")',
            "text.splitlines(keepends=True)",
            "tests/data/test_text.py::test_one_row_is_one_record_and_a_newline_alone_ends_a_line "
            "tests/data/test_arrays.py::test_one_row_of_a_table_is_one_record",
        ),
        "a separator in an item moves a row to another user": (
            "if any(cell.strip() for cell in cells[width:]):",
            "if False:",
            "tests/data/test_tables.py::test_a_table_that_cannot_be_used_is_named",
        ),
        "a quote that is not closed takes in the rows of others": (
            "delimiter=separator, strict=True",
            "delimiter=separator",
            "tests/data/test_tables.py::test_a_table_that_cannot_be_used_is_named",
        ),
        "a document in a folder that is called like a file is two records": (
            'path for path in folder.rglob("*") if path.is_file()',
            'folder.rglob("*")',
            "tests/data/test_text.py"
            "::test_each_file_of_a_folder_is_read_once_whatever_its_folders_are_called",
        ),
        "one record that is no UTF-8 changes how all are read": (
            "    except UnicodeDecodeError as error:\n        raise ValueError(\n"
            '            f"{path}: byte {error.start} is not {encoding.upper()}: save the file in that '
            'encoding"\n        ) from None\n',
            '    except UnicodeDecodeError:\n        return path.read_text("latin-1")\n',
            "tests/data/test_tables.py::test_a_file_that_cannot_be_read_is_named",
        ),
    },
    "dpx/data/histories.py": {
        "one user's type of items changes that of all": (
            "kept.append(items.astype(kind, copy=False))",
            "kept.append(items)",
            "tests/data/test_data.py::test_items_have_the_type_of_the_catalogue_whatever_users_have",
        ),
    },
    "dpx/data/interactions.py": {
        "products of Amazon are protected in place of people": (
            "if _PRODUCT.fullmatch(user.strip()) and _USER.fullmatch(item.strip()):",
            "if False:",
            "tests/data/test_data.py::test_amazon_of_another_year_is_refused_and_can_be_read",
        ),
    },
    "dpx/data/newsgroups.py": {
        "lengths of documents are centred at their own mean": (
            "y = (np.log1p(tokens) - math.log1p(typical_tokens)) / log_spread",
            "y = (np.log1p(tokens) - np.log1p(tokens).mean()) / log_spread",
            "tests/data/test_newsgroups.py::test_a_document_changes_one_prompt_only",
        ),
    },
    "dpx/data/parquet.py": {
        "one event without a user makes floats of all users in a block": (
            "whole = dates or (numbers and not column.null_count)",
            "whole = dates or numbers",
            "tests/release/test_blocks.py::test_an_event_that_cannot_be_read_is_named",
        ),
    },
    "dpx/data/records.py": {
        "records are sorted, and each kept once, before some are held out": (
            "    order = np.random.default_rng(seed).permutation(count)\n",
            "    texts = dataclasses.replace(texts, tokens=np.unique(texts.tokens, axis=0))\n"
            "    order = np.random.default_rng(seed).permutation(len(texts))\n",
            ONE_RECORD.format("text"),
        ),
        "records are held out, whoever wrote them": (
            '    count, unit = texts.num_units, "record" if texts.users is None else "user"\n',
            '    texts, unit = dataclasses.replace(texts, users=None), "record"\n'
            "    count = len(texts)\n",
            "tests/data/test_text.py::test_a_split_is_of_users_and_follows_from_their_number",
        ),
    },
    "dpx/data/text.py": {
        "a character that is no newline makes records of one person's line": (
            're.split("\\r\\n?|\\n", document.text)',
            "document.text.splitlines()",
            "tests/data/test_text.py::test_one_row_is_one_record_and_a_newline_alone_ends_a_line",
        ),
        "texts are as wide as the longest record": (
            "    rows, users = [], []\n    for place, text, user, _ in texts:\n        row",
            "    rows, users, texts = [], [], list(texts)\n"
            "    max_length = min(max_length, max(len(known.encode(one.text)) for one in texts))\n"
            "    for place, text, user, _ in texts:\n        row",
            ONE_RECORD.format("text"),
        ),
        "windows of a text of one's own overlap": (
            "    parts = [ids[: len(ids) // length * length].reshape(-1, length) for ids in parts]\n",
            "    parts = [\n        np.lib.stride_tricks.sliding_window_view(ids, length)[:: max(1, "
            "length // 2)]\n        for ids in parts\n        if len(ids) >= length\n    ]\n",
            "tests/data/test_text.py::test_alphabets_and_cuts",
        ),
    },
    "dpx/gram/accounting.py": {
        "replacing a column costs what removing one does": (
            "            return frobenius_sensitivity(self.column_bound, self.largest_change)",
            "            return self.column_bound**2",
            REPLACED.format("Gram, replace"),
        ),
        "rounding is missing in how far a column may move": (
            "* secure.FACTOR_STEPS + 2 * secure.rounding(n)",
            "* secure.FACTOR_STEPS",
            "tests/gram/test_gram_accounting.py::test_columns_that_are_rounded_are_longer_and_farther_apart",
        ),
    },
    "dpx/gram/columns.py": {
        "columns are not projected": (
            "rows *= np.minimum(scale / column_bound, 1 / np.maximum(norm, 1e-30))[:, None]",
            "rows *= (scale / column_bound)[:, None]",
            REMOVED.format("Gram, add or remove"),
        ),
        "columns are not projected under jit": (
            "rows = into_ball(columns, column_bound, axis=0).T / column_bound",
            "rows = columns.T / column_bound",
            "tests/gram/test_gram_sampling.py::test_columns_that_are_traced_are_rounded_to_the_same_integers",
        ),
        "columns that are summed as floats are not projected": (
            "columns = into_ball(columns, column_bound, axis=0)",
            "columns = columns * 1.0",
            "tests/gram/test_gram_columns.py::test_clipping_is_the_projection_for_every_input",
        ),
        "columns of a sparse matrix are not projected": (
            "entries *= np.minimum(scale, column_bound / np.maximum(norm, 1e-30))[owner]",
            "entries *= scale[owner]",
            "tests/gram/test_gram_columns.py::test_clipping_is_the_projection_for_every_input",
        ),
        "entries that a sparse column holds twice are added up in an order that other columns change": (
            "stored = block.tocoo()",
            "stored = block.tocsc(copy=True)\n    stored.sum_duplicates()\n    stored = stored.tocoo()",
            "tests/gram/test_gram_columns.py"
            "::test_entries_that_a_column_holds_twice_are_added_up_whatever_other_columns_hold",
        ),
        "traced columns of 32 bits are summed in 32 where the guarantee says nothing of rounding": (
            "X.astype(jnp.promote_types(X.dtype, jnp.result_type(float)))",
            "X",
            "tests/test_rounded_sums.py::test_where_nothing_is_said_sums_have_64_bits[Gram]",
        ),
    },
    "dpx/gram/mechanisms.py": {
        "one triangle of the Gram matrix is mirrored, with half of its noise": (
            "return (noisy + noisy.T) / 2",
            "lower = jnp.tril(noisy, -1) / 2 + jnp.tril(gram, -1) / 2\n"
            "    return lower + lower.T + jnp.diag(jnp.diag(noisy))",
            REPLACED.format("Gram, replace"),
        ),
    },
    "dpx/gram/releases.py": {
        "a sum of columns is released with another clipping": (
            'options = {"column_bound": column_bound, "clip": clip, "n": n}',
            'options = {"column_bound": column_bound, "clip": True, "n": n}',
            "tests/gram/test_gram_columns.py::test_a_sum_is_released_with_the_clipping_that_it_was_made_with",
        ),
    },
    "dpx/gram/wishart.py": {
        "the sampled Gram matrix has twice the samples that are admissible": (
            "num_samples = _at_least_n(epsilon, delta, terms)",
            "num_samples = 2 * _at_least_n(epsilon, delta, terms)",
            PRICE.format("sampled Gram, replace"),
        ),
        "sampling forgets the shift that keeps neighbours close": (
            "covariance = gram.astype(floor.dtype) * unit + floor",
            "covariance = gram.astype(floor.dtype) * unit + 0.01 * floor",
            REPLACED.format("sampled Gram, replace"),
        ),
        "the tails of a sampled Gram matrix end where those of JAX's chi-square do": (
            "diagonal = coupled.chi(chi_key, num_samples - jnp.arange(n), normals[:, n:])",
            "diagonal = jnp.sqrt(jax.random.chisquare(chi_key, num_samples - jnp.arange(n)))",
            "tests/noise/test_every_draw.py"
            "::test_what_is_drawn_outside_of_the_noise_is_listed_with_a_reason",
        ),
        "all rows of a sampled factor have as many degrees of freedom": (
            "num_samples - jnp.arange(n), normals",
            "num_samples - 0 * jnp.arange(n), normals",
            "tests/gram/test_gram_sampling.py::test_each_row_of_bartletts_factor_has_its_own_degrees_of_freedom",
        ),
        "the degrees of freedom of a sampled factor count from one": (
            "num_samples - jnp.arange(n), normals",
            "num_samples - 1 - jnp.arange(n), normals",
            "tests/gram/test_gram_sampling.py::test_each_row_of_bartletts_factor_has_its_own_degrees_of_freedom",
        ),
        "a sampled Gram matrix keeps the low bits of the exact one": (
            "grid.onto(grid_key, factor / step)",
            "(factor / step)",
            "tests/gram/test_gram_sampling.py::test_releases_lie_on_a_grid_that_neighbours_share",
        ),
        "the grid of a sampled Gram matrix follows the exact one": (
            "step = _GRID * math.sqrt(eta / num_samples)",
            "step = _GRID * jnp.sqrt(covariance[0, 0] / num_samples)",
            "tests/gram/test_gram_sampling.py::test_releases_lie_on_a_grid_that_neighbours_share",
        ),
        "rounding of what is put on a grid is not paid for": (
            "left = epsilon - 2 * cost, ",
            "left = epsilon, ",
            "tests/gram/test_gram_sampling.py::test_what_is_left_of_the_budget_covers_the_samples",
        ),
        "rounding of a Cholesky factor is not in how far a record moves it": (
            "(change + 2 * off) / (terms.eta - off)",
            "change / (terms.eta - off)",
            "tests/gram/test_gram_sampling.py::test_what_a_program_may_differ_by_is_paid_for",
        ),
        "the diagonal of a sampled factor shares draws with what is below it": (
            "normals[:, n:])",
            "normals[:, : coupled.SUMMED])",
            "tests/gram/test_gram_sampling.py::test_each_row_of_bartletts_factor_has_its_own_degrees_of_freedom[6]",
        ),
        "what a program differs by is taken off ε for one of two neighbours": (
            "left = epsilon - 2 * cost, delta",
            "left = epsilon - cost, delta",
            "tests/gram/test_gram_sampling.py::test_what_is_left_of_the_budget_covers_the_samples",
        ),
    },
    "dpx/runs/card.py": {
        "a model card shows what was measured without privacy": (
            "    own = [measure for measure in record.measures if measure.row in shown]\n",
            "    own = list(record.measures)\n",
            "tests/experiments/test_export.py::test_the_card_says_what_privacy_json_says",
        ),
    },
    "dpx/runs/comparison.py": {
        "the worst private baseline is called the best": (
            "return max(means, key",
            "return min(means, key",
            "tests/runs/test_comparison.py::test_the_best_baseline_follows_from_the_numbers",
        ),
    },
    "dpx/runs/experiment.py": {
        "on data of one's own all comparisons are paid for": (
            "return config.data.path is None",
            "return True",
            "tests/experiments/test_plans.py"
            "::test_on_ones_own_data_a_run_spends_what_it_is_given[text:tiny]",
        ),
    },
    "dpx/runs/export.py": {
        "the config of a run goes along with its model": (
            "    exported = model.export(folder, form=form, base=base)\n",
            "    exported = model.export(folder, form=form, base=base)\n"
            '    storage.write_text(folder / "run.json", (workdir / "config.json").read_text())\n',
            "tests/experiments/test_export.py::test_nothing_private_goes_along[adapters]",
        ),
    },
    "dpx/runs/grids.py": {
        "all points of a sweep have the same noise": (
            "if len(points) > 1 and config.noise_seed is not None:",
            "if False:",
            "tests/runs/test_sources.py::test_a_sweep_has_no_noise_seed",
        ),
    },
    "dpx/runs/records.py": {
        "runs of two ε count as seeds of one": (
            "config = json.dumps([record.source, others], sort_keys=True)",
            'config = record.title(skip="seed")',
            "tests/runs/test_report.py::test_runs_that_differ_in_more_than_the_seed_are_no_seeds",
        ),
        "a model is exported on another pretrained one than it was tuned on": (
            "    if record.public_files not in (None, digest_of_public_files(config)):\n",
            "    if False:\n",
            "tests/experiments/test_export.py"
            "::test_another_model_in_the_place_of_the_one_that_was_tuned_is_refused",
        ),
        "config.json shows the noise seed": (
            'return {**values, "noise_seed": keys.fingerprint(values["noise_seed"], workdir, new=new)}',
            "return values",
            LEDGER["recommender, warm"],
        ),
    },
    "dpx/runs/report.py": {
        "runs that name one file from two folders are not added up": (
            "os.path.join(record.folder, str(path))",
            "str(path)",
            "tests/runs/test_report.py::test_runs_on_one_file_are_added_up_however_they_read_it",
        ),
        "a run that reads less of a file is not in the total over it": (
            "os.path.realpath(os.path.join(record.folder, str(path)))",
            "json.dumps(data)",
            "tests/runs/test_report.py::test_runs_on_one_file_are_added_up_however_they_read_it",
        ),
        "a report is silent on guarantees that do not add up": (
            "return added_up + [_apart(units) for units in kinds.values() if len(units) > 1]",
            "return added_up",
            "tests/runs/test_run.py::test_totals_are_of_one_unit",
        ),
        "a report says of all runs what one of two rests on": (
            "if all(line in lines for lines in others)",
            "if any(line in lines for lines in others)",
            "tests/runs/test_report.py::"
            "test_a_report_of_several_points_begins_with_what_differs_and_says_all_else_once",
        ),
        "a report leaves assumptions out": (
            '[f"- assuming that {assumption}" for assumption in total["assumptions"]]',
            "[]",
            "tests/runs/test_run.py::test_what_is_not_covered_is_in_the_record_and_the_report",
        ),
    },
    "dpx/runs/run.py": {
        "the total is that of the first release": (
            "        ledger.spend(spent, label)\n    added_up",
            "        if not ledger.releases:\n            ledger.spend(spent, label)\n    added_up",
            LEDGER["text"],
        ),
        "the headline states the ε of the config": (
            "about = headline.to_json()",
            'about = {**headline.to_json(), "epsilon": config["epsilon"]}',
            LEDGER["text"],
        ),
        "a run is not locked": (
            "    with storage.lock(workdir) as still_mine:\n        if not _processes",
            "    if still_mine := lambda: None:\n        if not _processes",
            "tests/runs/test_experiments.py::test_a_folder_that_is_in_use_is_not_run_in",
        ),
        "a run states a pretrained model that took the place of its own": (
            "write(outcome, config, workdir, seconds, public)",
            "write(outcome, config, workdir, seconds, records.digest_of_public_files(config))",
            "tests/runs/test_run.py::test_a_run_states_the_public_files_that_it_began_with",
        ),
        "a run that had too little memory leaves its keys": (
            "                    keys.discard_unused(workdir)",
            "                    pass",
            "tests/runs/test_run.py::test_too_little_memory_is_one_line_and_leaves_no_keys",
        ),
        "a record does not say what is not covered": (
            '"not_covered": list(outcome.not_covered),',
            '"not_covered": [],',
            "tests/runs/test_run.py::test_what_is_not_covered_is_in_the_record_and_the_report",
        ),
        "that a seed must stay unknown is no assumption": (
            "        assumptions.append(_SEEDED)\n",
            "        pass\n",
            "tests/runs/test_run.py::test_how_it_was_run_is_an_assumption",
        ),
        "of plain releases beside others the largest δ counts": (
            "min(plain + largest * timed, 1 - 1e-12)",
            "min(max(plain, largest * timed), 1 - 1e-12)",
            "tests/runs/test_run.py::test_the_total_is_at_the_largest_delta_beside_the_sum_of_plain_ones",
        ),
        "a dry run shows the dearest release as the total": (
            "    total = compose(dict(planned.releases))\n",
            "    total = max(planned.releases.values(), key=lambda spent: spent.epsilon)\n",
            "tests/runs/test_command_line.py::test_dry_run_prints_the_privacy_parameters_and_writes_nothing",
        ),
    },
    "dpx/runs/selection.py": {
        "the key of the scores of a finished selection is kept": (
            "storage.delete_private(folder / records.PRIVATE / _DRAWN)",
            "pass",
            "tests/runs/test_sweep_selection.py"
            "::test_what_was_selected_stands_when_the_trials_are_deleted",
        ),
        "the scores of trials have no noise": (
            "noise_multiplier=asked.score_noise,",
            "noise_multiplier=0.0,",
            "tests/runs/test_sweep_selection.py::test_a_score_has_the_noise_that_is_paid_for",
        ),
        "the scores of all trials have the same noise": (
            "noise_of = keys.derive(jax.random.wrap_key_data(jax.numpy.asarray(words))).noise",
            "noise_of = lambda name: jax.random.wrap_key_data(jax.numpy.asarray(words))",
            "tests/runs/test_sweep_selection.py::test_every_score_has_noise_of_its_own",
        ),
        "a selection runs its grid from end to end": (
            "generator.integers(len(asked.grid), size=count)",
            "generator.permutation(np.resize(np.arange(len(asked.grid)), count))",
            "tests/runs/test_sweep_selection.py::test_points_are_drawn_uniformly_and_with_replacement",
        ),
        "a selection that was killed draws its trials again": (
            "if not path.exists():",
            "if drawn.unlink(missing_ok=True) is None:",
            "tests/runs/test_sweep_selection.py::test_private_draws_are_made_once",
        ),
        "what a dear selection has drawn is given away at the price of a cheap one": (
            'if storage.read_private(drawn).get("plan") != _digest(asked):',
            "if False:",
            "tests/runs/test_sweep_selection.py"
            "::test_what_was_drawn_for_one_selection_serves_no_other",
        ),
        "trials of a selection that goes on have noise for other data": (
            'if storage.read_private(drawn)["data"] != _data(asked):',
            "if False:",
            "tests/runs/test_sweep_selection.py::test_scores_have_noise_for_the_data_of_all_trials",
        ),
        "the trials of a selection read whatever data there are": (
            '            drawn["data"][point],\n',
            "",
            "tests/runs/test_sweep_selection.py::test_scores_have_noise_for_the_data_of_all_trials",
        ),
        "a run that costs more than was planned is selected": (
            "if spent != str(candidate.guarantee.event):",
            "if False:",
            "tests/runs/test_sweep_selection.py"
            "::test_a_run_that_costs_something_else_than_was_planned_is_not_selected",
        ),
        "a selected model states a pretrained one on which it was not made": (
            "files = None if ran is None else ran.public_files",
            "files = records.digest_of_public_files(config)",
            "tests/runs/test_sweep_selection.py"
            "::test_only_the_selected_model_and_its_noisy_score_are_given_away",
        ),
        "how long a selected trial took is given away": (
            "run.write(outcome, config, target, seconds=None, public_files=files)",
            "seconds = None if ran is None else ran.wall_seconds\n"
            "    run.write(outcome, config, target, seconds=seconds, public_files=files)",
            "tests/runs/test_sweep_selection.py"
            "::test_only_the_selected_model_and_its_noisy_score_are_given_away",
        ),
    },
    "dpx/runs/selection_plan.py": {
        "a selection goes on with noise for more held-out records": (
            '            "score_sensitivity": self.sensitivity,\n',
            "",
            "tests/runs/test_sweep_selection.py::test_scores_have_noise_for_the_data_of_all_trials",
        ),
        "trials of a selection may share a noise seed": (
            "    if config.noise_seed is not None:\n",
            "    if config.noise_seed is not None and config.noise_seed < 0:\n",
            "tests/runs/test_sweep_selection.py"
            "::test_selections_that_experiments_and_seeds_do_not_allow_are_named",
        ),
        "the trials of a selection may be logged where others read": (
            'if config.get("log") is not None:',
            'if config.get("log") == "":',
            "tests/runs/test_sweep_selection.py::test_the_trials_of_a_selection_are_logged_nowhere_else",
        ),
    },
    "dpx/ngram.py": {
        "n-grams of long records are not clipped": (
            "weights = np.minimum(1, l2_clip_norm / np.maximum(norms, 1))",
            "weights = np.ones_like(norms)",
            REMOVED.format("1-grams"),
        ),
        "n-grams are clipped by the norm of all records of a block": (
            "norms = np.sqrt(np.bincount(owners, repeats.astype(float) ** 2, count))",
            "norms = np.full(count, np.sqrt(np.sum(repeats**2)))",
            "tests/test_ngram.py::test_counts_are_those_of_one_record_after_the_other",
        ),
        "n-grams are clipped by the number of distinct ones": (
            "norms = np.sqrt(np.bincount(owners, repeats.astype(float) ** 2, count))",
            "norms = np.sqrt(np.bincount(owners, minlength=count))",
            "tests/test_ngram.py::test_counts_are_those_of_one_record_after_the_other",
        ),
        "n-grams are smoothed by the exact counts of shorter contexts": (
            "_smooth(np.asarray(noisy), order",
            "_smooth(np.where(np.asarray(noisy) > 1, noisy, counts * l2_clip_norm / 2**30), order",
            REMOVED.format("3-grams"),
        ),
        "a token below zero is counted beside the last one": (
            "if np.any(mask & ((tokens < 0) | (tokens >= vocab_size))):",
            "if False:",
            "tests/test_ngram.py::test_tokens_outside_the_vocabulary_are_refused",
        ),
        "a block of n-grams starts with what is no token": (
            "    table = _checked_table(order, vocab_size, start, l2_clip_norm)\n    order, v",
            "    table = dict(order=order, vocab_size=vocab_size, start=start, l2_clip_norm=l2_clip_norm)\n"
            "    order, v",
            "tests/test_ngram.py::test_tables_that_are_none_are_refused_in_a_block_too",
        ),
        "n-grams are clipped by the root of how many there are": (
            "norms = np.sqrt(np.bincount(owners, repeats.astype(float) ** 2, count))",
            "norms = np.sqrt(np.bincount(owners, repeats, count))",
            "tests/test_ngram.py::test_one_name_moves_the_counts_by_at_most_the_clip",
        ),
        "that a user has one identifier is no assumption of n-grams": (
            '(cells.ONE_EACH,) if summed.options["of_users"] else ()',
            "()",
            "tests/test_ngram.py::test_counts_of_a_user_are_clipped_together[1.5]",
        ),
        "n-grams of a user are clipped for each record": (
            "owner, count = _owners(len(tokens), users)",
            "owner, count = _owners(len(tokens), None)",
            "tests/test_ngram.py::test_counts_of_a_user_are_clipped_together[1.5]",
        ),
        "n-grams of users and of records are added up": (
            'options = table | {"of_users": users is not None}',
            'options = table | {"of_users": True}',
            "tests/test_ngram.py::test_counts_of_a_user_are_clipped_together[1.5]",
        ),
    },
    "dpx/nn/cross_attention.py": {
        "the memory's key is fixed": (
            "released = sketch.build(\n            key,",
            "released = sketch.build(\n            jax.random.key(0),",
            PRICE.format("cross-attention layer"),
        ),
    },
    "dpx/noise/coupled.py": {
        "Laplace draws end where their bits do": (
            "zeros = 32 * empty + jax.lax.clz(first)",
            "zeros = jax.lax.clz(first)",
            "tests/noise/test_noise.py::test_exponential_draws_end_at_the_bound_and_nowhere_before_it",
        ),
        "the sign of Laplace noise is the coin that says whether it is large": (
            "sign = 1 - 2.0 * (low >> 1 & 1)",
            "sign = 1 - 2.0 * (low & 1)",
            "tests/noise/test_noise.py::test_signs_are_fair_and_say_nothing_of_sizes",
        ),
        "chi draws are kept whatever they are": (
            "keep = others > 3 * depth * remainder(y)",
            "keep = (y > -1) & (others >= 0)",
            "tests/noise/test_coupled.py::test_draws_are_kept_with_their_probability",
        ),
        "chi draws of few degrees of freedom have one too many": (
            "jnp.arange(SUMMED) < freedom[:, None]",
            "jnp.arange(SUMMED) <= freedom[:, None]",
            "tests/noise/test_coupled.py::test_chi_draws_follow_their_law_and_its_tails[5]",
        ),
        "exponential draws near zero are those of JAX's logarithm": (
            "near = jnp.where(small < 0.25, small * _series(_LOGARITHM, small), -jnp.log(1 - small))",
            "near = -jnp.log1p(-small)",
            "tests/noise/test_coupled.py"
            "::test_exponential_draws_are_exact_to_2_to_the_minus_50_whatever_bits_follow",
        ),
        "draws of a sampled Gram matrix end where their first word does": (
            "return [*tails.fill(more, words[0]), *words[1:]]",
            "return [jnp.maximum(words[0], 1), jnp.zeros(count, jnp.int32), *words[1:]]",
            "tests/noise/test_coupled.py::test_the_largest_draws_have_no_end",
        ),
        "the coin of an exponential draw is a bit of its mantissa": (
            "return jnp.where(low & 1 == 0, near, far)",
            "return jnp.where(high & 1 == 0, near, far)",
            "tests/noise/test_coupled.py"
            "::test_exponential_draws_are_exact_to_2_to_the_minus_50_whatever_bits_follow",
        ),
    },
    "dpx/noise/grid.py": {
        "what is put on a grid goes to the nearest point, before noise is added": (
            "(uniform < x - below)",
            "(0.5 < x - below)",
            "tests/noise/test_grid.py::test_whole_numbers_have_the_stated_probabilities",
        ),
        "what is put on a grid has no noise of its own": (
            "+ zeros[0] - zeros[1])",
            ")",
            "tests/noise/test_grid.py::test_whole_numbers_have_the_stated_probabilities",
        ),
    },
    "dpx/noise/lattice.py": {
        "a value is rounded to the grid to its nearest point, as its low bits say": (
            "whole = (fixed + uniform >> _POINTS) - 1 + normal",
            "whole = jnp.round(rest).astype(jnp.int32) + normal",
            "tests/noise/test_lattice.py::test_remainders_are_rounded_by_three_uniform_numbers",
        ),
        "a value and its noise meet in floating point": (
            "noisy = (coarse + (fine + whole.astype(exact.dtype))) * step",
            "noisy = exact + (uniform * 2.0**-_POINTS - 1.5 + normal) * step",
            "tests/noise/test_noise_release.py::test_releases_lie_on_the_grid_of_their_noise",
        ),
        "a remainder is rounded by two uniform numbers": (
            "    third = (words.rounding & 31) << 23",
            "    third = jnp.uint32(2**27 - 2**22)",
            "tests/noise/test_lattice.py::test_remainders_are_rounded_by_three_uniform_numbers",
        ),
        "the last bits of a draw are not looked at, so that the law ends in steps": (
            "above = (size < high) | ((size == high) & (low < rest))",
            "above = size < high",
            "tests/noise/test_lattice.py"
            "::test_a_whole_number_is_the_count_of_thresholds_above_its_bits",
        ),
        "the table ends the tail of normal noise": (
            "magnitude = jnp.where(is_far(words), far, magnitude)",
            "magnitude = magnitude",
            "tests/noise/test_leaves.py::test_words_that_are_zero_are_drawn_again",
        ),
        "the grid of normal noise is rounded to the nearest step, not up": (
            "(bits + mask) & ~mask",
            "(bits + mask // 2) & ~mask",
            "tests/noise/test_lattice.py::test_values_are_cut_without_rounding",
        ),
        "what remainders are rounded by is not paid for": (
            "paid = RESOLUTION - moved(dtype) * jnp.asarray(multiplier_norm, dtype)",
            "paid = RESOLUTION + 0 * jnp.asarray(multiplier_norm, dtype)",
            "tests/noise/test_lattice.py"
            "::test_noise_is_as_large_as_the_roundings_of_many_remainders_ask_for",
        ),
        "two of the numbers that round a remainder share bits": (
            "second = (words.rounding >> 5 & 0x7FFF) << 13",
            "second = (words.rounding >> 8 & 0x7FFF) << 13",
            "tests/noise/test_lattice.py::test_remainders_are_rounded_by_three_uniform_numbers",
        ),
    },
    "dpx/noise/laws.py": {
        "a law takes a list of sizes that are no sizes": (
            "        for each in value:\n            _check_positive(name, each)",
            "        return",
            "tests/noise/test_noise.py::test_misuse_raises",
        ),
        "Laplace noise is drawn in 32 bits": (
            "        with jax.enable_x64(True):\n            return self.scale * signed",
            "        with jax.enable_x64(False):\n            return self.scale * signed",
            "tests/noise/test_noise.py::test_signs_are_fair_and_say_nothing_of_sizes",
        ),
        "the truncated Laplace bound forgets the 2 of 2δ": (
            "ratio = math.log1p(math.expm1(epsilon) / (2 * delta))",
            "ratio = math.log1p(math.expm1(epsilon) / (20 * delta))",
            "tests/noise/test_noise.py::test_guarantees "
            "tests/noise/test_noise.py::test_truncated_laplace_covers_a_change_split_over_two_entries",
        ),
        "the variance of Laplace noise is taken for its scale": (
            "return cls(scale=sensitivity / epsilon, bound",
            "return cls(scale=sensitivity / epsilon / math.sqrt(2), bound",
            "tests/noise/test_noise.py::test_guarantees",
        ),
    },
    "dpx/noise/leaves.py": {
        "every leaf of a release has the same draw": (
            "pieces = zip(*(jnp.split(x.ravel()[: sum(sizes)], cuts) for x in draw), strict=True)",
            "pieces = zip(*([jnp.resize(x, n) for n in sizes] for x in draw), strict=True)",
            DOOR,
        ),
        "words that draws share are the own ones of the first draws": (
            "word[None] for word in _pair(shared_key, columns)",
            "word[None] for word in _pair(own_key, columns)",
            "tests/noise/test_leaves.py::test_entries_are_those_of_one_draw",
        ),
        "arrays of one shape have the words of the first": (
            "k: Draw(draw.normal[i], draw.uniform[i])",
            "k: Draw(draw.normal[0], draw.uniform[0])",
            STREAM + "test_each_entry_is_drawn_from_its_own_words",
        ),
        "words for other arrays are spread over these": (
            "        _check_fits(key, shapes)\n",
            "",
            STREAM + "test_bad_input_is_named",
        ),
    },
    "dpx/noise/release.py": {
        "one leaf of a release has no noise": (
            "        check_finite(noisy, label)\n        norm",
            "        noisy[1:] = leaves[1:]\n        norm",
            DOOR,
        ),
        "all columns of a release share a draw": (
            "step_of(std, leaf.dtype, multiplier_norm=norm), *draw)",
            "step_of(std, leaf.dtype, multiplier_norm=norm), "
            "*(x[..., :1] if x.ndim > 1 else x for x in draw))",
            DOOR,
        ),
        "the sensitivities of columns are averaged": (
            "sizes = [(noise_multiplier, one) for one in unit]",
            "sizes = [(noise_multiplier, jnp.mean(one)) for one in unit]",
            DOOR,
        ),
        "a std is divided by √2": (
            "step_of(std, leaf.dtype",
            "step_of(std * 0.5**0.5, leaf.dtype",
            DOOR,
        ),
        "the noise is drawn from a fixed key": (
            "draws_like(key, leaves), strict=True)",
            "draws_like(jax.random.key(0), leaves), strict=True)",
            DOOR,
        ),
        "releases keep the low bits of the exact value": (
            "return rounded.astype(exact.dtype)",
            "return noisy.astype(exact.dtype)",
            "tests/noise/test_noise_release.py::test_releases_lie_on_the_grid_of_their_noise",
        ),
        "the grid follows the exact value": (
            "_, exponent = jnp.frexp(scale * _GRID)",
            "_, exponent = jnp.frexp(noisy * _GRID)",
            "tests/noise/test_noise_release.py::test_releases_lie_on_the_grid_of_their_noise",
        ),
        "Laplace noise of traced values is added in 32 bits": (
            "    with jax.enable_x64(True):\n        noisy = exact.astype",
            "    with jax.enable_x64(False):\n        noisy = exact.astype",
            "tests/noise/test_noise_release.py::test_laplace_noise_is_added_in_64_bits",
        ),
        "noise that floats flush to zero is released": (
            "if np.any(is_meant & (std < least)):",
            "if False:",
            "tests/noise/test_noise_release.py::test_noise_that_floats_would_flush_is_refused",
        ),
        "noise of a traced size that floats flush to zero is released": (
            "return jnp.where(lost, jnp.nan, noisy)",
            "return noisy",
            "tests/noise/test_noise_release.py::test_noise_of_a_traced_size_that_floats_would_flush_makes_nan",
        ),
        "entries of a release share their draws where a sensitivity has more of them": (
            "        if not fits:\n",
            "        if False:\n",
            "tests/noise/test_noise_release.py::test_what_would_share_draws_or_guarantee_nothing_is_refused[rows]",
        ),
        "a law gives all arrays the same noise": (
            "if law is not None and len(leaves) != 1:",
            "if False:",
            "tests/noise/test_noise_release.py::test_what_would_share_draws_or_guarantee_nothing_is_refused[two]",
        ),
        "only the first leaf of a release has to be finite": (
            "for leaf in jax.tree.leaves(released):",
            "for leaf in jax.tree.leaves(released)[:1]:",
            "tests/noise/test_noise_release.py::test_what_would_share_draws_or_guarantee_nothing_is_refused[leaf]",
        ),
        "devices may add one noise to values that differ": (
            "        _check_drawn_once(label, key, leaves)\n",
            "",
            "tests/noise/test_noise_release.py::test_noise_that_devices_would_share_is_refused",
        ),
        "noise of a stream is used where neighbours differ in where its tail ends": (
            "        check_noise(noise_multiplier)",
            "        pass",
            STREAM + "test_noise_whose_tail_would_end_too_soon_is_refused",
        ),
    },
    "dpx/noise/secure.py": {
        "exact sums forget that contributions are rounded": (
            "return steps + math.ceil(rounding(entries))",
            "return steps - math.ceil(rounding(entries))",
            "tests/noise/test_noise_release.py::"
            "test_rounding_makes_a_record_longer_by_half_a_unit_for_each_entry",
        ),
        "discrete noise has half of its variance": (
            "math.sqrt(_EXTRA_VARIANCE)) * (1 + 2.0**-40)",
            "math.sqrt(_EXTRA_VARIANCE)) / math.sqrt(2)",
            "tests/noise/test_secure.py::test_noise_is_a_discrete_gaussian_of_the_declared_size",
        ),
        "contributions beyond the bound enter exact sums": (
            "return np.where(right[owners], rounded, 0)",
            "return rounded",
            "tests/noise/test_secure.py::test_a_contribution_beyond_the_bound_counts_as_zero",
        ),
        "sums are rounded to 32 bits before the noise": (
            "return release(key, exact * unit, sensitivity",
            "return release(key, (exact * unit).astype(np.float32), sensitivity",
            PRICE.format("transitions"),
        ),
        "squares of contributions leave 64 bits": (
            "right = (squares <= norm_bound(steps, entries) ** 2) & (rough < 2**62)",
            "right = squares <= norm_bound(steps, entries) ** 2",
            "tests/noise/test_secure.py::test_contributions_whose_squares_leave_64_bits_count_as_zero",
        ),
    },
    "dpx/noise/stream.py": {
        "a step's number is the counter of the cipher, so that its words come again in other steps": (
            'struct.pack("<4I", 0, *place, *(0,) * (3 - len(place)))',
            'struct.pack("<4I", *place, *(0,) * (4 - len(place)))',
            STREAM + "test_places_have_words_of_their_own",
        ),
        "the words of noise are those of the first step in every step": (
            "FURTHER, step, group)",
            "FURTHER, 0, group)",
            f"{STREAM}test_no_two_arrays_or_steps_share_a_word "
            f"{SECURE}test_no_place_of_a_stream_serves_twice",
        ),
        "all arrays have the same words": (
            "FURTHER, step, group)",
            "FURTHER, step)",
            f"{STREAM}test_no_two_arrays_or_steps_share_a_word "
            f"{SECURE}test_no_place_of_a_stream_serves_twice",
        ),
        "the word that rounds a value is the one that draws its noise": (
            "parts = size.reshape(own), rounding.reshape(own), *shared",
            "parts = size.reshape(own), size.reshape(own), *shared",
            STREAM + "test_no_two_arrays_or_steps_share_a_word",
        ),
    },
    "dpx/noise/tails.py": {
        "words of zeros are not drawn again, and end the tail": (
            "return jax.lax.while_loop(lambda state: (state[1] == 0).any(), draw, state)[1:]",
            "return state[1:]",
            "tests/noise/test_noise.py::test_words_of_zeros_are_drawn_again_and_counted",
        ),
    },
    "dpx/noisy_head/accounting.py": {
        "the steps of NoisyHead are paid as one": (
            "multiplier = gaussian_noise_multiplier(epsilon, delta, compositions=steps)",
            "multiplier = gaussian_noise_multiplier(epsilon, delta)",
            PRICE.format("NoisyHead"),
        ),
        "that only the last iterate is released is no assumption": (
            '+ (_LAST_ITERATE_ONLY if self.accounting == "last_iterate" else ())',
            "",
            "tests/noisy_head/test_noisy_head_privacy.py::test_a_guarantee_says_what_its_user_must_see_to",
        ),
    },
    "dpx/noisy_head/descent.py": {
        "the parameters of NoisyHead leave the ball": (
            "nearest = projections.projection_l2_ball(moved, radius)",
            "nearest = moved",
            "tests/noisy_head/test_noisy_head_privacy.py"
            "::test_every_iterate_lies_in_the_ball_that_the_sensitivity_assumes",
        ),
        "all iterates are released at the price of the last": (
            'if trajectory and accounting == "last_iterate":',
            'if trajectory and accounting == "none":',
            "tests/noisy_head/test_noisy_head_privacy.py::test_misuse",
        ),
        "NoisyHead starts outside of its ball": (
            "np.linalg.norm(init) > radius * (1 + 1e-12)",
            "np.linalg.norm(init, 2) > radius * (1 + 1e-12)",
            "tests/noisy_head/test_noisy_head_privacy.py::test_misuse",
        ),
    },
    "dpx/noisy_head/moment_sums.py": {
        "√2 is missing in the joint sensitivity of the second moments": (
            "return 2 * math.sqrt(2) * G**2, 2 * C * G",
            "return 2 * G**2, 2 * C * G",
            "tests/noisy_head/test_noisy_head_sensitivity.py::test_joint_sensitivity_under_attack",
        ),
        "half of the noise is taken off the second moments": (
            "    values, vectors = _eigh(pair_symmetric(H.reshape((dim,) * 4)))",
            "    H = (H + exact[0]) / 2\n    values, vectors = _eigh(pair_symmetric(H.reshape((dim,) * 4)))",
            REPLACED.format("NoisyHead, one shot"),
        ),
        "noise of the second moments is for features that are not rounded": (
            "stds = joint_noise(rounded_bounds(hyper, dim))",
            "stds = joint_noise(hyper)",
            "tests/noisy_head/test_noisy_head_privacy.py::test_noise_of_one_release_covers_the_rounding_of_features",
        ),
    },
    "dpx/noisy_head/sensitivity.py": {
        "features are not projected": (
            "shrink = jnp.minimum(1, hyper.feature_radius / jnp.where(size > 0, size, 1))",
            "shrink = jnp.ones_like(size)",
            REPLACED.format("NoisyHead"),
        ),
        "targets are not clipped": (
            "jnp.clip(jnp.where(usable, target, 0), -hyper.response_clip, hyper.response_clip),",
            "jnp.where(usable, target, 0),",
            REPLACED.format("NoisyHead"),
        ),
        "NoisyHead has half its sensitivity": (
            "return G * (2 * C + R * G) if",
            "return G * (2 * C + R * G) / 2 if",
            "tests/noisy_head/test_noisy_head_sensitivity.py::test_gradient_sensitivity_under_attack",
        ),
    },
    "dpx/privacy/_cache.py": {
        "a cached calibration is believed": (
            "if stored is not None and holds(stored):",
            "if stored is not None:",
            "tests/privacy/test_privacy.py::test_a_cached_multiplier_is_checked_before_it_is_used",
        ),
    },
    "dpx/privacy/allocation.py": {
        "a record that joins an epoch of random allocation is priced like one that leaves": (
            "losses(-ratios.last, without[::-1].copy())",
            "losses(ratios.first, joined)",
            "tests/privacy/test_allocation.py::test_small_epochs_cost_what_samples_of_their_losses_say",
        ),
        "means of ratios between two points are rounded up": (
            "np.clip(up, 0, partners, out=up)",
            "up = partners.copy()",
            "tests/privacy/test_allocation.py::test_small_epochs_cost_what_samples_of_their_losses_say",
        ),
        "an epoch of random allocation is priced for half of those who are in it": (
            "event.released / event.steps)",
            "event.released / event.steps / 2)",
            "tests/privacy/test_allocation.py::test_small_epochs_cost_what_samples_of_their_losses_say",
        ),
        "an epoch that has begun is not paid for before it ends": (
            "        if count\n",
            "        if count and steps == released\n",
            "tests/privacy/test_allocation.py::test_an_event_has_the_epochs_that_are_drawn",
        ),
        "what is cut off from the losses of an epoch counts as nothing": (
            "lost = max(0.0, 1 - float(mass.sum())) + 2 * tail",
            "lost = 0.0",
            "tests/privacy/test_allocation.py::test_mass_is_lost_as_said_and_no_more",
        ),
    },
    "dpx/privacy/calibration.py": {
        "what is released beside a training run is forgotten by the calibration": (
            "return run if beside is None else dp_accounting.ComposedDpEvent([beside, run])",
            "return run",
            "tests/privacy/test_privacy.py::test_calibration_beside_another_release_fits_one_budget",
        ),
        "a cached multiplier may cost a twentieth more": (
            "0.99 * epsilon <= spent(stored) <= epsilon",
            "0.99 * epsilon <= spent(stored) <= 1.05 * epsilon",
            "tests/privacy/test_privacy.py::test_a_cached_multiplier_is_checked_before_it_is_used",
        ),
        "without sampling, what is released beside a training is not taken off": (
            'if gaussian_mu(described) is not None and beside is None and accountant == "pld":',
            'if gaussian_mu(described) is not None and accountant == "pld":',
            "tests/privacy/test_privacy.py::test_calibration_beside_another_release_fits_one_budget",
        ),
    },
    "dpx/privacy/composition.py": {
        "rounding in the composition of many steps is not in ε": (
            "return 1e-16 * self.steps",
            "return 1e-19 * self.steps",
            "tests/privacy/test_composition.py::test_rounding_of_many_compositions_is_in_epsilon",
        ),
        "of many steps one is counted": (
            "one.self_compose(count, _TAIL)",
            "one.self_compose(1, _TAIL)",
            "tests/privacy/test_composition.py::test_many_steps_cost_hardly_more_than_in_closed_form",
        ),
        "an event without any noise costs nothing": (
            "    if isinstance(mechanism, dp_accounting.NonPrivateDpEvent):\n        return 0.0\n",
            "",
            "tests/privacy/test_ledger.py::test_what_has_no_noise_has_no_guarantee",
        ),
        "of several mechanisms the last one is counted": (
            "pld = pld.compose(one.self",
            "pld = (one.self",
            "tests/privacy/test_composition.py::test_every_use_of_every_part_counts",
        ),
        "a Gaussian mechanism that is repeated counts once beside others": (
            "noise / math.sqrt(count)",
            "noise",
            "tests/privacy/test_composition.py::test_every_use_of_every_part_counts",
        ),
        "of a composition that is repeated the inner one counts": (
            "yield from uses(event.event, count * event.count)",
            "yield from uses(event.event, event.count)",
            "tests/privacy/test_composition.py::test_every_use_of_every_part_counts",
        ),
    },
    "dpx/privacy/dpsgd.py": {
        "a sample that is cut off is priced without the record that joins": (
            'check_integer(num_examples, "num_examples") + 1',
            'check_integer(num_examples, "num_examples")',
            "tests/privacy/test_truncated.py::test_a_sample_that_is_cut_off_is_priced_for_one_record_more",
        ),
        "that samples are secret is no assumption": (
            '            f"which {units} are sampled stays as secret as the noise",\n',
            "",
            "tests/privacy/test_ledger.py::test_training_says_what_it_rests_on",
        ),
    },
    "dpx/privacy/events.py": {
        "privacy losses are rounded down": (
            "return float(losses.get_epsilon_for_delta(delta - planned.rounding))",
            "return float(losses.get_epsilon_for_delta(delta - planned.rounding)) - interval",
            "tests/privacy/test_ledger.py::test_dpsgd_composes_with_gaussians_and_plain "
            "tests/privacy/test_privacy.py::test_an_accountant_never_says_less_than_hypothesis_testing",
        ),
        "μ adds up in place of its square: k releases cost √k too little": (
            "mus.append(1 / noise * math.sqrt(count) if",
            "mus.append(1 / noise if",
            PRICE.format("NoisyHead"),
        ),
        "only the most expensive of several releases counts": (
            "return math.hypot(*mus)",
            "return max(mus, default=0.0)",
            "tests/privacy/test_ledger.py::test_gaussians_add_up_exactly",
        ),
        "an event of 16 bits is accounted in 16 bits": (
            "            changes[field] = number\n",
            "            changes[field] = value\n",
            "tests/test_narrow_numbers.py::test_what_follows_from_narrow_numbers_follows_from_wide_ones[ledger-float16]",
        ),
    },
    "dpx/privacy/gaussian.py": {
        "compositions are forgotten by the calibration": (
            "return math.sqrt(compositions) / mu",
            "return 1 / mu",
            "tests/privacy/test_privacy.py::test_gaussian_compositions",
        ),
        "the noise of an epsilon of 16 bits is computed in 16 bits": (
            "    epsilon, delta = check_epsilon(epsilon), check_delta(delta)\n",
            "    check_epsilon(epsilon), check_delta(delta)\n",
            "tests/test_narrow_numbers.py::test_what_follows_from_narrow_numbers_follows_from_wide_ones[Gaussian-float16]",
        ),
        "digits of δ cancel at tiny budgets": (
            "if mu < _SMALL_MU:",
            "if False:",
            "tests/privacy/test_privacy.py::test_gaussian_is_exact_in_delta",
        ),
        "the budget of a multiplier has a larger δ": (
            "small = min(delta, 0.1 / noise_multiplier)",
            "small = max(delta, 0.1 / noise_multiplier)",
            "tests/privacy/test_privacy.py::test_a_budget_of_a_multiplier_has_no_larger_delta",
        ),
    },
    "dpx/privacy/ledger.py": {
        "of plain guarantees the largest δ counts, not the sum": (
            "plain_delta = math.fsum(spent.delta for spent in plain)",
            "plain_delta = max((spent.delta for spent in plain), default=0.0)",
            "tests/privacy/test_ledger.py::test_plain_guarantees_add_up",
        ),
        "bare events are missing from the ledger": (
            "                events.append(spent)\n                continue",
            "                continue",
            "tests/privacy/test_ledger.py::test_plain_guarantees_add_up",
        ),
        "a total forgets its plain guarantees where it is spent again": (
            "event=None if plain else event",
            "event=event",
            "tests/privacy/test_ledger.py::test_a_total_with_a_plain_guarantee_has_no_event",
        ),
        "units are compared with the last release alone": (
            "for _, before in self._entries:\n",
            "for _, before in self._entries[-1:]:\n",
            "tests/privacy/test_ledger.py::test_units_are_compared_with_all_that_was_spent_before",
        ),
        "a total of guarantees for replacement speaks of adding and removing": (
            "neighboring = stated[0].neighboring if stated else ADD_OR_REMOVE_ONE",
            "neighboring = ADD_OR_REMOVE_ONE",
            "tests/privacy/test_ledger.py::test_a_total_speaks_of_the_relation_of_its_parts",
        ),
        "sampling amplifies guarantees for replacement as those for removal": (
            "or (spent.neighboring == ADD_OR_REMOVE_ONE and accountable(event))",
            "or accountable(event)",
            "tests/privacy/test_ledger.py::test_a_total_speaks_of_the_relation_of_its_parts",
        ),
        "units are compared until there is a bare event": (
            "                if not isinstance(before, PrivacyGuarantee):\n                    continue",
            "                if not isinstance(before, PrivacyGuarantee):\n                    break",
            "tests/privacy/test_ledger.py::test_units_are_compared_with_all_that_was_spent_before",
        ),
        "a total assumes what its first release does": (
            "assumptions += spent.assumptions",
            "assumptions = assumptions or list(spent.assumptions)",
            "tests/privacy/test_ledger.py::test_a_total_assumes_what_each_of_its_parts_does",
        ),
    },
    "dpx/privacy/risk.py": {
        "replacing a record risks what removing one does": (
            "mu *= 1 if asked == stated else 2",
            "mu *= 1",
            "tests/privacy/test_risk.py::test_replacing_a_record_moves_a_gaussian_twice_as_far[1.0]",
        ),
        "the risk of one relation is that which was found for the other": (
            "key = repr(event), epsilon, delta, asked",
            "key = repr(event), epsilon, delta",
            "tests/privacy/test_risk.py::test_releases_compose",
        ),
    },
    "dpx/privacy/sampled.py": {
        "losses between two points of a grid are rounded down": (
            "    probs[1:] += up\n",
            "    probs[:-1] += up\n",
            "tests/privacy/test_composition.py::test_one_step_is_an_upper_bound_of_what_"
            "hypothesis_testing_says "
            "tests/privacy/test_composition.py::test_many_steps_cost_hardly_more_than_in_closed_form",
        ),
        "a record that joins is priced like one that leaves": (
            "_on_grid(-losses, without, interval, 2 * tail)",
            "_on_grid(losses, both, interval, 2 * tail)",
            "tests/privacy/test_composition.py::test_it_is_what_dp_accounting_finds_at_once",
        ),
        "a sampled step is priced by its mean alone": (
            "    both = (1 - probability) * without + probability * shifted\n",
            "    both = without\n",
            "tests/privacy/test_composition.py::test_one_step_is_an_upper_bound_of_what_hypothesis_testing_says",
        ),
    },
    "dpx/privacy/selection.py": {
        "the number of trials of a selection ends where a word does": (
            'int.from_bytes(generator.bytes(32), "big")) / 2**256',
            'int.from_bytes(generator.bytes(8), "big")) / 2**64',
            "tests/privacy/test_selection.py::test_numbers_of_trials_do_not_end_where_those_of_numpy_do",
        ),
        "a selection costs what its first candidate does": (
            "worst = np.max(list(curves.values()), axis=0)",
            "worst = next(iter(curves.values()))",
            "tests/privacy/test_selection.py::test_the_largest_divergence_counts_at_every_order "
            "tests/runs/test_sweep_selection.py::test_every_candidate_is_in_the_price_drawn_or_not",
        ),
        "of two candidates the largest ε counts, not the largest divergences": (
            "epsilon=epsilon(whole),",
            "epsilon=max(epsilon(selected_rdp(orders, c, trials)) for c in curves.values()),",
            "tests/privacy/test_selection.py::test_the_largest_divergence_counts_at_every_order",
        ),
        "a selection is priced for a law of fewer trials": (
            "*one, trials.mean, trials.shape)",
            "*one, trials.mean, 0.5)",
            "tests/privacy/test_selection.py::test_agrees_with_dp_accounting",
        ),
        "the number of trials is its mean": (
            "            return count",
            "            return round(self.mean)",
            "tests/privacy/test_selection.py::test_numbers_of_trials_follow_their_law",
        ),
    },
    "dpx/reattention/noise_std.py": {
        "the exact shares of tokens correct the attention": (
            "np.clip(noisy.counts / num_records, 0, 1)",
            "np.clip(popularity.count(histories) / num_records, 0, 1)",
            REMOVED.format("token probabilities"),
        ),
        "token probabilities are divided by the private number of records": (
            'num_records = _watch.public(len(histories.items), "the number of records")',
            "num_records = len(histories.items)",
            REMOVED.format("token probabilities"),
        ),
    },
    "dpx/recommend/item_gram.py": {
        "popularity and Gram matrix have one key": (
            "popularity_key, gram_key = noise.secure.split(key, secure)",
            "popularity_key = gram_key = key",
            REMOVED.format("item Gram"),
        ),
    },
    "dpx/recommend/metrics.py": {
        "a score that is not a number counts for more than the first rank": (
            "jnp.where(jnp.isnan(own[:, 0]), jnp.inf, 0.5 + counts.sum(axis=1))",
            "0.5 + counts.sum(axis=1)",
            "tests/experiments/test_candidates.py::test_no_user_moves_a_metric_by_more_than_is_declared",
        ),
    },
    "dpx/recommend/popularity.py": {
        "long histories are not rescaled in the popularity": (
            "weights *= np.minimum(1.0, l2_clip_norm / np.maximum(norms, 1))[users]",
            "weights *= 1.0",
            REMOVED.format("popularity"),
        ),
        "the items that lead are those of the exact popularity": (
            'items = np.argsort(-noisy, kind="stable")[:num_kept]',
            'items = np.argsort(-counts.sums[0], kind="stable")[:num_kept]',
            REMOVED.format("item Gram"),
        ),
        "the popularity's share is not deducted from the rest": (
            "of_rest = noise_multiplier / math.sqrt(1 - budget_fraction)",
            "of_rest = noise_multiplier",
            PRICE.format("transitions"),
        ),
        "the popularity has the whole budget": (
            "of_popularity = noise_multiplier / math.sqrt(budget_fraction)",
            "of_popularity = noise_multiplier",
            PRICE.format("item Gram"),
        ),
        "that the number of users is public is no assumption": (
            '("the catalogue of items is public", "the number of users is public")',
            '("the catalogue of items is public",)',
            "tests/recommend/test_popularity.py::test_what_is_public_is_an_assumption",
        ),
    },
    "dpx/recommend/rounds.py": {
        "all rounds of transitions have the same noise": (
            "jax.random.fold_in(key, number),",
            "jax.random.fold_in(key, 0),",
            REMOVED.format("transitions"),
        ),
        "later rounds of transitions are not divided by their own norm": (
            "weights /= np.sqrt(np.where(squares > 0, squares, 1))[users]",
            "weights /= np.sqrt(np.where(squares > 0, squares, 1))[users] ** 0.5",
            "tests/recommend/test_transitions.py::test_later_rounds_have_the_same_sensitivity",
        ),
        "pairs that a user reaches often are added up in an order that other users change": (
            "    sums, *coordinates = sum_entries(*joined, shape[1])  # a history may reach an entry often\n"
            "    return sparse.csr_array((sums, tuple(coordinates)), shape=shape)",
            "    return sparse.csr_array((joined[0], joined[1:]), shape=shape)",
            "tests/recommend/test_transitions.py::test_the_pairs_of_a_user_are_the_same_bits_whoever_else_is_there",
        ),
        "pairs that the exact counts find remain": (
            "kept = kept & (estimate > cut * std * np.sqrt(counted))",
            "kept = kept & (counts.reshape(estimate.shape) > 0)",
            REMOVED.format("transitions"),
        ),
    },
    "dpx/recommend/transitions.py": {
        "every round of transitions has the whole budget": (
            "std = leading.noise_multiplier * math.sqrt(rounds)",
            "std = leading.noise_multiplier",
            PRICE.format("transitions"),
        ),
    },
    "dpx/release/blocks.py": {
        "a block that is lost on the way is not missed": (
            "if lost := sorted(self._names - summed.blocks):",
            "if lost := list[str]():",
            "tests/release/test_blocks.py::test_a_block_that_is_lost_or_comes_twice_ends_the_release",
        ),
    },
    "dpx/release/encoding.py": {
        "partial sums can be saved like a release": (
            '"Partial": "dpx.release",',
            "",
            "tests/release/test_sums.py::test_partials_are_private",
        ),
        "private records within a tree of one's own are saved": (
            "if _is_array(leaf) or is_one_of(_PRIVATE, leaf)",
            "if _is_array(leaf)",
            "tests/release/test_saving.py::test_no_key_is_saved",
        ),
    },
    "dpx/release/files.py": {
        "text in a block is as wide as the longest cell": (
            "column = np.array(column, object)",
            "column = np.array(column)",
            "tests/release/test_blocks.py::test_arrays_keep_the_type_of_the_file_and_have_no_gaps",
        ),
        "the catalogue of a block is that of its events": (
            "return Histories(by_user(users, labels.astype(np.int64)[codes], clock), num_items)",
            "num_items = max(map(int, labels), default=0) + 1\n"
            "    return Histories(by_user(users, labels.astype(np.int64)[codes], clock), num_items)",
            "tests/release/test_blocks.py::test_an_error_names_its_block",
        ),
    },
    "dpx/release/sums.py": {
        "a block may count twice": (
            "if twice := sorted(one.blocks & other.blocks):",
            "if twice := list[str]():",
            "tests/release/test_sums.py::test_nothing_counts_twice_and_parts_fit_together",
        ),
        "parts that were summed in different ways are merged": (
            "return structure == same and all(map(np.array_equal, ours, theirs))",
            "return structure == same",
            "tests/release/test_sums.py::test_nothing_counts_twice_and_parts_fit_together",
        ),
    },
    "dpx/training/adaptive.py": {
        "the count beside the gradients has no sensitivity": (
            "return 1.0, ratio / 2",
            "return 1.0, 0.0",
            "tests/training/test_adaptive.py::test_gradients_and_count_cost_what_one_mechanism_costs",
        ),
        "a training goes on with another adaptive clipping norm": (
            "[None if x is None else float(x) for x in dataclasses.astuple(l2_clip_norm)]",
            "[float(l2_clip_norm.start)]",
            GOES_ON,
        ),
    },
    "dpx/training/arguments.py": {
        "an optimizer adds the noise of its own clipping": (
            "            if type(part) in _UNFIT:\n",
            "            if False:\n",
            REFUSED,
        ),
    },
    "dpx/training/calibration.py": {
        "blocks of banded noise are longer than its bands": (
            "public_size(num_examples), math.ceil(steps / bands)",
            "public_size(num_examples), math.ceil(steps / bands / 2)",
            "tests/training/test_correlated.py::test_it_costs_what_blocks_of_steps_cost",
        ),
        "the steps that are paid for are one less": (
            "return calibrated, guarantee(steps)",
            "return calibrated, guarantee(steps - 1)",
            COST,
        ),
        "training is paid for with the ε of the config, whatever was drawn": (
            "noise_multiplier=multiplier,\n        spent",
            "noise_multiplier=0.8 * multiplier,\n        spent",
            COST,
        ),
        "the prior is missing from its row's ledger": (
            "        if beside is None:\n            return alone(steps)",
            "        if True:\n            return alone(steps)",
            LEDGER["text"],
        ),
        "training is calibrated as if nothing were released before it": (
            "steps=blocks, beside=event, **about)",
            "steps=blocks, **about)",
            "tests/training/test_calibrated.py::test_a_budget_includes_what_was_released_before",
        ),
    },
    "dpx/training/checkpoints.py": {
        "checkpoints are made with the noise key": (
            "return params, (noise.count, *rest)",
            "return params, (noise, *rest)",
            "tests/training/test_correlated.py::test_no_checkpoint_holds_noise_that_may_be_taken_back",
        ),
    },
    "dpx/training/correlated.py": {
        "columns of the banded matrix are longer than one": (
            "return tuple((best / np.linalg.norm(best)).tolist())",
            "return tuple((best / best[0]).tolist())",
            "tests/training/test_correlated.py"
            "::test_the_matrix_has_columns_of_norm_one_that_overlap_within_a_block_only",
        ),
        "correlated noise remembers the newest residue last": (
            "jnp.concatenate([(x - y)[None], old])[: len(rest)]",
            "jnp.concatenate([old, (x - y)[None]])[-len(rest) :]",
            "tests/training/test_correlated.py::test_what_the_optimizer_sees_is_the_slow_construction",
        ),
        "banded noise is weighted at a device's own precision": (
            "left, 1, precision=highest)",
            "left, 1)",
            "tests/test_matmul_precision.py::test_products_are_at_the_highest_precision[banded]",
        ),
    },
    "dpx/training/examples.py": {
        "one record of a list changes the type of all": (
            "if len(types) > 1:",
            "if False:",
            REFUSED,
        ),
        "nobody hears that the rows of a source are to be records": (
            "return (*inferred, *((sources.ROW_BY_ROW,) if any(of_source) else ()))",
            "return inferred",
            "tests/training/test_fit_sources.py::test_fit_takes_records_one_by_one_and_says_what_it_assumes",
        ),
    },
    "dpx/training/fitting.py": {
        "a plan follows the private number of records": (
            "calibration.public_size(rows),\n        epsilon",
            "rows,\n        epsilon",
            "tests/training/test_planning.py::test_a_plan_does_not_follow_the_records",
        ),
        "a process trains with other settings than those of the guarantee": (
            "_processes.check_same(settings | monitoring.every)",
            "pass",
            "tests/training/test_resuming.py"
            "::test_processes_with_other_arguments_are_refused_before_anything_is_kept",
        ),
        "a training goes on with another loss or optimizer, and the same noise": (
            '        settings["loss_fn"] = programs.of_loss(narrow, *given)\n'
            '        settings["optimizer"] = programs.of_optimizer(optimizer, wide)\n',
            "",
            "tests/training/test_resuming.py::test_a_folder_goes_on_with_nothing_else[finished]",
        ),
        "a finished training is repeated under another accountant": (
            '"accountant": None if accountant == "pld" else accountant,',
            "",
            GOES_ON,
        ),
        "a loss is first looked at when its training has begun": (
            "        plan.forms(plan.read(of_one, trained.leaves, batch, microbatch_size != 1), "
            '"two_pass")\n',
            "        pass\n",
            REFUSED,
        ),
        "a training goes on with samples that are cut off elsewhere": (
            "dataclasses.asdict(way) | {",
            "{",
            GOES_ON,
        ),
        "types that follow from the records count as public without a word": (
            "            *assumed(data),\n",
            "",
            "tests/training/test_fit.py"
            "::test_takes_what_users_have_and_says_whether_types_follow_from_it[pandas]",
        ),
        "a training goes on with another generator of random numbers": (
            '"generator": None if (made := purposes.generator()) == "threefry2x32" else made,',
            "",
            "tests/training/test_resuming.py::test_nor_in_the_generator_of_the_noise",
        ),
        "rows are called what they are not, in the guarantee": (
            'stated = f"row of the data, which is called {unit}"',
            "pass",
            "tests/training/test_fit_calls.py::test_a_unit_is_what_a_row_is_called",
        ),
        "users are sampled and accounted as if each record were one": (
            "layout = Layout(mesh, records if grouped is None else len(grouped))",
            "layout = Layout(mesh, records)",
            "tests/training/test_users.py::test_the_guarantee_is_about_users_and_their_number",
        ),
        "that a user has one identifier is no assumption": (
            "            *(() if grouped is None else (people.ASSUMPTION,)),\n",
            "",
            "tests/training/test_users.py::test_the_guarantee_is_about_users_and_their_number",
        ),
        "a killed training goes on with other parts of the parameters under its thresholds": (
            "*(parts if any(parts) else ())",
            "",
            GOES_ON,
        ),
        "a killed training goes on with other users": (
            "whose = () if grouped is None else (grouped.order, grouped.begins)",
            "whose = ()",
            GOES_ON,
        ),
        "a secure training leaves a folder before its noise is refused": (
            "        stream.check_noise(privacy.noise_multiplier)",
            "        pass",
            REFUSED,
        ),
    },
    "dpx/training/keys.py": {
        "a trial of a selection runs on other data than it is priced for": (
            "if _PLANNED.get() not in (None, same):",
            "if False:",
            "tests/runs/test_sweep_selection.py::test_scores_have_noise_for_the_data_of_all_trials",
        ),
        "what a training begins with is not remembered": (
            "of_label(key, (same, settings))",
            'of_label(key, (same, ""))',
            PURPOSES + "test_a_training_under_keys_is_not_repeated_with_other_data_or_arguments",
        ),
        "the fingerprint of a noise seed is one that can be looked up": (
            "salt=salt, n=2**14",
            'salt=b"", n=2**14',
            "tests/training/test_resuming.py"
            "::test_a_fingerprint_says_nothing_of_a_seed_in_another_folder",
        ),
        "the random bytes of a fingerprint are of the seed": (
            '{"salt": os.urandom(32).hex()}',
            '{"salt": hashlib.sha256(str(noise_seed).encode()).hexdigest()}',
            "tests/training/test_resuming.py"
            "::test_a_fingerprint_says_nothing_of_a_seed_in_another_folder",
        ),
        "noise comes from the public seed": (
            "return from_seed(config.noise_seed)",
            "return from_seed(config.seed)",
            LEDGER["recommender, warm"],
        ),
        "a training under a run's keys returns the result of other settings": (
            "_processes.of_first(lambda: resuming.check_training(workdir, same, settings, under))",
            "pass",
            "tests/training/test_resuming.py::test_under_a_runs_keys_a_result_is_that_of_its_own_arguments",
        ),
        "the keys of a finished run are kept": (
            "            shutil.rmtree(folder)\n",
            "            pass\n",
            "tests/runs/test_experiments.py::test_keys_are_fresh_from_the_system_and_kept_until_discarded",
        ),
        "sampling has 16 bits of entropy": (
            '"sampling": os.urandom(32).hex()',
            '"sampling": os.urandom(2).hex()',
            "tests/training/test_resuming.py::test_keys_have_all_bits_of_their_entropy",
        ),
        "two trainings with one key pass": (
            "    again = digest in _used and",
            "    again = False and",
            "tests/training/test_fit_calls.py::test_a_key_that_trained_before_is_warned_of",
        ),
        "a secure training draws from JAX's generator, and its guarantee says otherwise": (
            'settings["label"], bool(settings.get("secure"))',
            'settings["label"], False',
            SECURE + "test_noise_and_samples_follow_from_the_secret_alone",
        ),
    },
    "dpx/training/log.py": {
        "losses are printed where they should not be": (
            "if shown and not _QUIET.get() and _processes.is_first():",
            "if _processes.is_first():",
            "tests/training/test_fit_calls.py::test_losses_are_on_stderr_unless_they_should_not_be",
        ),
        "an evaluation is logged as a number that a guarantee covers": (
            '"epsilon", "l2_clip_norm")',
            '"epsilon")',
            "tests/training/test_resuming.py"
            "::test_an_evaluation_is_numbers_by_names_that_mean_nothing_else",
        ),
    },
    "dpx/training/loop.py": {
        "a record counts ten times beside its gradient": (
            "adaptive.counted(result.norms[0], mask, privacy.count_ratio)",
            "10 * adaptive.counted(result.norms[0], mask, privacy.count_ratio)",
            REPLAYED.format("adaptive"),
        ),
        "noise is drawn for every piece, of a share of the std": (
            "return grads.add(result.grads), loss + result.losses.sum()",
            "noise = jax.tree.map(lambda g: privacy.noise_multiplier / 8 * jax.random.normal("
            "jax.random.fold_in(dropout_key, index), g.shape), result.grads)\n"
            "            return grads.add(jax.tree.map(jnp.add, result.grads, noise)), "
            "loss + result.losses.sum()",
            "tests/training/test_training.py::test_noise_enters_once_whatever_the_pieces",
        ),
        "the sum is divided by the realised batch size": (
            "updates, opt_state = optimizer.update(grads, opt_state, params, **words)",
            "grads = jax.tree.map(lambda g: g * 9.0 / jnp.maximum(mask.sum(), 1), grads)\n"
            "    updates, opt_state = optimizer.update(grads, opt_state, params, **words)",
            MOVED,
        ),
        "dropout masks belong to the slot": (
            "names = record_keys(dropout_key, number, names)",
            "names = jax.random.split(jax.random.fold_in(dropout_key, index), piece)",
            MOVED,
        ),
        "dropout masks are public": (
            "dropout = dropout_key, step",
            "dropout = jax.random.key(0), step",
            SECRET,
        ),
        "the noise of training has a fixed key": (
            '"key": None if isinstance(noise, Stream) else noise,',
            '"key": jax.random.key(0),',
            SECRET,
        ),
        "sampling follows from the key of the noise": (
            "seed=keys.sampling,",
            "seed=int(jax.random.key_data(keys.noise)[1]),",
            SECRET,
        ),
        "the sampling probability is that of a private count": (
            "num_examples = layout.rows if privacy is None else public_size(layout.rows)",
            "num_examples = layout.rows",
            MOVED,
        ),
        "a finished training whose result is gone trains again": (
            "if finished and start != steps:",
            "if False:",
            "tests/training/test_resuming.py::test_a_finished_training_does_not_train_again",
        ),
        "noise that is taken back later is written to checkpoints": (
            "(bands == 1 and done % monitoring.checkpoint_every == 0)",
            "done % monitoring.checkpoint_every == 0",
            RESUMED.format("banded"),
        ),
        "banded noise covers the largest group of parameters alone": (
            "sensitivity = math.hypot(*jax.tree.leaves(clips))",
            "sensitivity = max(jax.tree.leaves(clips))",
            "tests/training/test_correlated.py::test_all_groups_of_parameters_are_in_the_sensitivity",
        ),
        "a training may do something else than its guarantee is about": (
            "    check_priced(privacy, probability, steps, num_examples)\n",
            "",
            "tests/training/test_calibrated.py::test_a_training_does_what_its_guarantee_is_about",
        ),
        "a training that goes on draws the noise of its first steps again": (
            "bits_of_steps(keys.noise, shapes, layout, range(start, steps))",
            "bits_of_steps(keys.noise, shapes, layout, range(steps))",
            RESUMED.format("secure"),
        ),
    },
    "dpx/training/privatize.py": {
        "noise is divided by the batch size, as the sum is": (
            "noise_multiplier=noise_multiplier,\n            label=label,",
            "noise_multiplier=noise_multiplier / expected_batch_size,\n            label=label,",
            COST,
        ),
        "every step has the same noise": (
            "jax.random.fold_in(state.key, state.count) if bits is None",
            "state.key if bits is None",
            MOVED,
        ),
        "only the first group's threshold scales the noise": (
            "else math.hypot(*clips)",
            "else clips[0]",
            "tests/training/test_privatize.py::test_noise_has_the_stated_law",
        ),
        "squares of traced clips underflow, and with them the noise": (
            "sensitivity = norm(jnp.stack(wide)) if traced",
            "sensitivity = jnp.linalg.norm(jnp.stack(wide)) if traced",
            "tests/training/test_privatize.py"
            "::test_traced_clips_whose_squares_leave_their_floats_keep_their_noise",
        ),
        "the key of a training stands in its compiled program": (
            "            _drawn_from(state, bits),",
            "            _drawn_from(state._replace(key=key), bits),",
            "tests/training/test_training.py::test_no_program_has_a_key_in_it",
        ),
    },
    "dpx/training/programs.py": {
        "arrays that a loss closes over are no part of it when a training goes on": (
            "[np.frombuffer(text.encode(), np.uint8), *arrays]",
            "[np.frombuffer(text.encode(), np.uint8)]",
            "tests/training/test_programs.py::test_a_loss_is_told_from_one_that_differs_in",
        ),
    },
    "dpx/training/purposes.py": {
        "noise and dropout share a key": (
            'self._key("dropout of training", label)',
            'self._key("noise of training", label)',
            MOVED,
        ),
        "samples follow from the secret of the noise": (
            "self._of_samples = seed.generate_state(8).tobytes()",
            "self._of_samples = self._of_noise",
            PURPOSES + "test_what_is_for_different_purposes_shares_nothing",
        ),
        "keys follow from their names alone": (
            "key=secret, digest_size=size",
            "digest_size=size",
            PURPOSES + "test_what_is_for_different_purposes_shares_nothing",
        ),
        "a release and a training of one name share a key": (
            'f"{kind}: {name}".encode()',
            "name.encode()",
            PURPOSES + "test_what_is_for_different_purposes_shares_nothing",
        ),
        "the label is no part of the key of a training's noise": (
            'noise=noise("noise of training", label)',
            'noise=noise("noise of training", "")',
            PURPOSES + "test_trainings_of_two_labels_share_neither_noise_nor_samples_nor_masks",
        ),
        "trainings of two labels share their samples": (
            'sampling=sampling("samples of training", label)',
            'sampling=sampling("samples of training", "")',
            PURPOSES + "test_trainings_of_two_labels_share_neither_noise_nor_samples_nor_masks",
        ),
        "a name is given its key twice": (
            "if given and (begun is None or begun != repeated):",
            "if False:",
            PURPOSES + "test_a_name_serves_once[noise]",
        ),
        "a training of other data has the keys of the first": (
            "(begun is None or begun != repeated)",
            "begun is None",
            PURPOSES + "test_a_training_under_keys_is_not_repeated_with_other_data_or_arguments",
        ),
        "a secret key has 32 bits": (
            "return of_words(np.frombuffer(os.urandom(4 * _key_words()), np.uint32))",
            "return jax.random.key(int.from_bytes(os.urandom(4)))",
            "tests/training/test_resuming.py::test_keys_have_all_bits_of_their_entropy",
        ),
        "a draw is given its seed twice": (
            '        self._give("draw", draw)\n',
            "",
            "tests/training/test_purposes.py::test_a_name_serves_once",
        ),
        "samples and noise of a training are of one stream": (
            'sampling=sampling("samples of training", label)',
            'sampling=sampling("noise of training" if secure else "samples of training", label)',
            SECURE + "test_no_place_of_a_stream_serves_twice",
        ),
        "two trainings of one run have one stream": (
            "return Stream(_hashed(self._of_streams, kind, name, SECRET_BYTES))",
            'return Stream(_hashed(self._of_streams, kind, "", SECRET_BYTES))',
            SECURE + "test_noise_and_samples_follow_from_the_secret_alone",
        ),
        "a stream has the 64 bits of a JAX key for its secret": (
            "return Stream(_hashed(self._of_streams, kind, name, SECRET_BYTES))",
            "return Stream(_hashed(self._of_noise, kind, name, SECRET_BYTES))",
            SECURE + "test_noise_and_samples_follow_from_the_secret_alone",
        ),
    },
    "dpx/training/resuming.py": {
        "a run goes on under a version that draws other noise": (
            'if before.get("randomness") != _RANDOMNESS:',
            "if False:",
            "tests/training/test_resuming.py"
            "::test_under_another_version_whose_noise_differs_nothing_goes_on",
        ),
        "a run resumes on other data with the same noise": (
            'if stored.get("data") != data:',
            "if False:",
            "tests/runs/test_experiments.py::test_keys_belong_to_the_data_that_they_were_made_for",
        ),
        "a run in several processes resumes where one has other data": (
            "if any(other != own for other in _processes.of_each(own)):",
            "if False:",
            "tests/training/test_resuming.py::test_data_that_another_process_has_otherwise_are_refused",
        ),
        "a run that lost its keys draws new ones": (
            "    if left:",
            "    if False:",
            "tests/runs/test_experiments.py::test_new_keys_are_not_made_for_a_run_that_has_begun",
        ),
        "a run that lost its keys releases once more what is no model": (
            "names.difference(_BEFORE) if settings is None else names.intersection(_TRAINED)",
            "names.intersection(_TRAINED)",
            "tests/runs/test_experiments.py::test_new_keys_are_not_made_for_a_run_that_has_begun",
        ),
        "a training goes on under other keys, and takes records twice in an epoch": (
            '.get("under", under) != under',
            '.get("under", under) == ""',
            "tests/training/test_resuming.py::test_a_training_under_keys_goes_on_under_these_keys_alone",
        ),
    },
    "dpx/training/sampling.py": {
        "samples that are cut off are accounted as whole ones": (
            "        if self.max_batch_size is None:\n            return {",
            "        if True:\n            return {",
            "tests/training/test_fit.py::test_samples_that_are_cut_off_are_those_that_are_accounted",
        ),
        "steps with banded noise sample from all groups": (
            "chosen = chosen[group[chosen] == step % groups]",
            "",
            "tests/training/test_sampling.py::test_each_step_samples_from_one_group",
        ),
        "the records with the lowest numbers are kept of a sample that is cut off": (
            "chosen = np.sort(chosen[np.argpartition(draws[chosen], most)[:most]])",
            "chosen = chosen[:most]",
            "tests/training/test_sampling.py::test_samples_are_cut_off_at_random_and_have_one_shape",
        ),
        "batches have a fixed size": (
            "chosen = np.flatnonzero(draws < sampling_probability)",
            "chosen = np.sort(np.argsort(draws)[: round(num_examples * sampling_probability)])",
            "tests/training/test_sampling.py::test_batch_sizes_follow_the_binomial_law",
        ),
        "large batches are cut off": (
            "chosen = np.flatnonzero(draws < sampling_probability)",
            "chosen = np.flatnonzero(draws < sampling_probability)"
            "[: math.ceil(1.1 * num_examples * sampling_probability)]",
            "tests/training/test_sampling.py::test_batch_sizes_follow_the_binomial_law",
        ),
        "an epoch is shuffled and cut into batches": (
            "chosen = np.flatnonzero(draws < sampling_probability)",
            "first = step % max(1, round(1 / sampling_probability))\n"
            "        order = np.random.default_rng(root.generate_state(1)).permutation(num_examples)\n"
            "        chosen = np.sort(order[first :: max(1, round(1 / sampling_probability))])",
            "tests/training/test_sampling.py::test_batch_sizes_follow_the_binomial_law "
            "tests/training/test_sampling.py::test_each_example_joins_independently",
        ),
        "an epoch of random allocation is a shuffle that is cut into batches of one size": (
            ".integers(length, size=ids.max() + 1)[ids]",
            ".permutation(ids.max() + 1)[ids] % length",
            "tests/training/test_sampling.py::test_batch_sizes_follow_the_binomial_law[allocated_batches-PCG64]",
        ),
        "the allocation of one epoch is used again in the next": (
            "own = _generator(root, number, 2)",
            "own = _generator(root, 0, 2)",
            "tests/training/test_sampling.py::test_each_epoch_is_drawn_anew",
        ),
        "a record is in two batches of an epoch": (
            "np.flatnonzero(own == step - begin)",
            "np.flatnonzero((step - begin - own) % length < 2)",
            "tests/training/test_sampling.py::test_each_record_is_in_one_batch_of_each_epoch",
        ),
        "epochs of random allocation are priced as Poisson samples": (
            'return {"sampling": "allocation"}',
            'return {"sampling": "poisson"}',
            REPLAYED.format("allocation"),
        ),
        "Poisson samples are priced as epochs of random allocation": (
            'return {"sampling": "poisson"}',
            'return {"sampling": "allocation"}',
            REPLAYED.format("poisson"),
        ),
        "allocations follow from the order of the records": (
            ".integers(length, size=ids.max() + 1)[ids]",
            ".integers(length, size=num_examples)",
            "tests/training/test_sampling.py::test_a_record_moves_its_own_batches_alone[allocation]",
        ),
        "a key that is given as a seed is shown": (
            'if np.ndim(given) or jnp.issubdtype(getattr(given, "dtype", int), jax.dtypes.prng_key):',
            "if False:",
            "tests/test_contracts.py::test_a_key_that_is_given_as_a_seed_is_not_shown",
        ),
        "groups of records are drawn from the numbers that sample the first step": (
            "_generator(root, 0, 1).integers",
            "_generator(root, 0).integers",
            "tests/training/test_sampling.py::test_groups_are_drawn_apart_from_samples",
        ),
        "a replay prices samples that are cut off as whole ones": (
            "    _watch.check_samples(max_batch_size)\n",
            "",
            "tests/audit/test_replay_instrument.py::test_samples_that_are_cut_off_cannot_be_priced",
        ),
        "the seed of samples is no key to a replay": (
            '    _watch.key_used(_shown(root), "sampling")\n',
            "",
            "tests/audit/test_replay_instrument.py::test_every_other_difference_is_named",
        ),
        "groups follow from the order of the records": (
            "_generator(root, 0, 1).integers(groups, size=ids.max() + 1)[ids]",
            "ids % groups",
            "tests/training/test_sampling.py::test_groups_are_drawn_and_each_record_is_in_one",
        ),
        "two children of one seed have the same samples": (
            "spawned = (*root.spawn_key, *purpose)",
            "spawned = purpose",
            "tests/training/test_sampling.py::test_children_of_one_seed_have_samples_of_their_own",
        ),
    },
    "dpx/training/sources.py": {
        "the first record of a source chooses the types of all": (
            "if (kinds, structure) != first:",
            "if kinds.keys() != first[0].keys():",
            "tests/training/test_fit_sources.py::test_an_odd_row_is_refused_or_changes_no_other",
        ),
        "one missing value makes floats of a column of integers": (
            "    if missing.any():\n",
            "    if False:\n",
            "tests/training/test_fit_sources.py::test_an_odd_row_is_refused_or_changes_no_other",
        ),
    },
    "dpx/training/trackers.py": {
        "a log that goes elsewhere does not say what nothing covers": (
            'name if name in _COVERED else f"not_covered/{name}": value',
            "name: value",
            "tests/training/test_trackers.py"
            "::test_a_function_gets_what_the_history_has_and_names_what_nothing_covers",
        ),
    },
    "dpx/training/users.py": {
        "a user counts as often as they have records": (
            ".sum() / jnp.maximum(there.sum(), 1)",
            ".sum()",
            "tests/training/test_users.py"
            "::test_a_user_is_one_example_whose_loss_is_the_mean_of_all_records[poisson]",
        ),
        "the user with the most records says how many a step takes": (
            "return numbered(codes, len(labels), most)",
            "return numbered(codes, len(labels), int(np.bincount(codes).max()))",
            "tests/training/test_users.py::test_what_a_step_holds_does_not_grow_with_the_largest_user",
        ),
        "which records a user gives follows from how many the users before have": (
            "    counts = counts[users]\n",
            "    keys = losses.for_each(jax.random.fold_in, keys.dtype, keys, begins[users])\n"
            "    counts = counts[users]\n",
            "tests/training/test_users.py::test_what_a_user_draws_follows_from_nobody_else[threefry2x32] "
            "tests/audit/test_replay_training.py"
            "::test_a_user_moves_each_step_by_their_clipped_gradient_alone[poisson]",
        ),
        "how many records users have is in the program that adds them up": (
            "return drawn(dropout, (held, ids, places, words)), (own, mask, pieces)",
            "found = drawn(dropout, (held, ids, places, words))\n"
            "        more = lambda x: jnp.concatenate([x, x[jnp.zeros(users.begins[-1], int)]])\n"
            "        return jax.tree.map(more, found), (own, mask, pieces)",
            "tests/training/test_users.py::test_the_program_of_a_step_is_the_same_for_other_users",
        ),
        "the first records of each user are taken in every step": (
            "return jnp.where(count > most, chosen, few)",
            "return few",
            "tests/training/test_users.py::test_records_are_distinct_and_each_choice_is_as_likely[6]",
        ),
        "records of a user are drawn with replacement": (
            "jnp.where(taken, last[number], drawn[number])",
            "drawn[number]",
            "tests/training/test_users.py::test_records_are_distinct_and_each_choice_is_as_likely[6]",
        ),
        "a user takes the place of a missing record with one of the next user": (
            "few = jnp.minimum(jnp.arange(most), jnp.maximum(count - 1, 0))",
            "few = jnp.arange(most)",
            "tests/training/test_users.py::test_what_a_step_holds_does_not_grow_with_the_largest_user",
        ),
        "a user of two processes counts as two": (
            "    _check_apart(labels)\n",
            "",
            "tests/training/test_users.py::test_a_user_of_two_processes_is_refused",
        ),
        "devices look for the records of their users among those of the first device": (
            "rows = (begins[users] - begins[0])[:, None] + places",
            "rows = begins[users][:, None] + places",
            "tests/training/test_meshes.py::test_training_is_that_on_one_device[users, data 4, model 2]",
        ),
        "users draw their records by their places in the batch": (
            "[everybody[layout.numbers(places)]]",
            "[own]",
            SECURE + "test_which_records_a_user_gives_follows_from_the_stream",
        ),
        "users draw their records by their places in the data": (
            "[everybody[layout.numbers(places)]]",
            "[layout.numbers(places)]",
            REPLAYED.format("secure users"),
        ),
    },
    "experiments/audit/canaries.py": {
        "an audit does not say that its noise is public": (
            "        synthetic=True,\n",
            "",
            PLANNED.format("audit:ngram"),
        ),
    },
    "experiments/cross_attention/classifiers.py": {
        "class means are released at half of their sensitivity": (
            "sensitivity = np.sqrt(5) / 2 * (1 + 1e-6)",
            "sensitivity = np.sqrt(5) / 4 * (1 + 1e-6)",
            CONFIG.format("gram:features"),
        ),
        "a class mean forgets that its count moves too": (
            "sensitivity = np.sqrt(5) / 2 * (1 + 1e-6)",
            "sensitivity = 1 + 1e-6",
            CONFIG.format("gram:features"),
        ),
    },
    "experiments/cross_attention/kernel_regression.py": {
        "the private mean of sales is missing from the ledger": (
            '        "dp_mean": mean.guarantee,\n',
            "",
            PLANNED.format("cross_attention:diamonds"),
        ),
        "second moments of a regression are released for a record that is removed": (
            "sensitivity=math.sqrt(2) * p",
            "sensitivity=p",
            WORST.format("regression"),
        ),
        "prices are not clipped before they are multiplied": (
            "u = np.clip(np.column_stack([x, y]).astype(np.float64), -1, 1)",
            "u = np.column_stack([np.clip(x, -1, 1), y]).astype(np.float64)",
            WORST.format("regression, far"),
        ),
    },
    "experiments/cross_attention/labelled.py": {
        "held-out documents name the groups of what is released": (
            "names = sorted({later[1][row] for row in public})",
            "names = sorted(set(later[1]))",
            "tests/experiments/test_cross_attention_experiments.py::test_a_document_that_asks_names_no_group",
        ),
        "an embedding is fitted on private documents too": (
            "embedding = fit_embedding(list(public.texts), config.dim)",
            "embedding = fit_embedding([*private.texts, *public.texts], config.dim)",
            ONE_RECORD.format("labelled"),
        ),
        "without later texts, half of the held-out private ones define the keys": (
            'if config.data.kind == "table" and config.data.test_path is None:',
            "if False:",
            "tests/experiments/test_wrong_settings.py::test_it_is_named"
            "[cross_attention:sentences,tiny-data.kind-data.path-data.text-data.label]",
        ),
        "a projection is fitted on private documents too": (
            "fit_projection(features(list(public.texts)), config.dim)",
            "fit_projection(features((*private.texts, *public.texts)), config.dim)",
            ONE_RECORD.format("encoded"),
        ),
    },
    "experiments/cross_attention/next_tokens.py": {
        "draws of a memory of tokens have the same noise": (
            """        for draw in range(_draws(config)):
            label = _label(name, draw)
            memory = release_memory(config, keys.noise(label), total)
""",
            """        key = keys.noise(name)
        for draw in range(_draws(config)):
            label = _label(name, draw)
            memory = release_memory(config, key, total)
""",
            SHARED.format("next_tokens:tiny"),
        ),
        "two memories of texts have one key": (
            "memory = release_memory(config, keys.noise(label), total)",
            'memory = release_memory(config, keys._key("release", str(draw)), total)',
            CONFIG.replace(",", ":").format("next_tokens"),
        ),
        "how many private documents there are is written into the notes": (
            'notes=f"Means over',
            'notes=f"{len(private)} documents. Means over',
            CONFIG.replace(",", ":").format("next_tokens"),
        ),
        "frequencies of texts are missing from the ledger": (
            "        composed=releases,  # the row both reads the release of the row memory\n",
            '        composed={x: y for x, y in releases.items() if "memory" in x},\n',
            PLANNED.replace(",", ":").format("next_tokens"),
        ),
        "a memory resumes on other public documents with the same noise": (
            "begun = (*private.arrays, *later.take(known).arrays, *tuned_text.model_files(config))",
            "begun = (*private.arrays, *tuned_text.model_files(config))",
            "tests/experiments/test_public_files.py::test_a_memory_follows_from_public_documents",
        ),
        "each text of a user is a record of a memory": (
            "private, later = docs.load(config, language.tokenizer, joined=True)",
            "private, later = docs.load(config, language.tokenizer)",
            "tests/experiments/test_next_tokens.py::test_all_that_a_user_wrote_is_one_record",
        ),
    },
    "experiments/cross_attention/query_error.py": {
        "the memories of two trials have one name": (
            'return keys.noise(f"{cell.place} of memory {trial}")',
            "return keys.noise(cell.place)",
            SHARED.format("cross_attention:size,tiny"),
        ),
    },
    "experiments/cross_attention/reader.py": {
        "all blocks of a reader have the same noise": (
            """for number, layer in enumerate(self.attention):
            key = keys.noise(f"memory of block {number}")
""",
            """key = keys.noise("memory")
        for layer in self.attention:
""",
            SHARED.format("cross_attention:reader,tiny"),
        ),
        "each block of a reader spends the whole budget": (
            "multiplier = gaussian_noise_multiplier(epsilon, delta) * len(self.attention) ** 0.5",
            "multiplier = gaussian_noise_multiplier(epsilon, delta)",
            PLANNED.format("cross_attention:reader"),
        ),
    },
    "experiments/cross_attention/retrieval.py": {
        "private class means are weighted by the exact shares of the classes": (
            'scores["class_means"] = data.queries @ means.T',
            'scores["class_means"] = data.queries @ means.T / shares',
            "tests/experiments/test_cross_attention_experiments.py"
            "::test_what_private_class_means_say_is_weighted_by_nothing_exact",
        ),
        "losses on the progress line are not named": (
            '    "losses of the logistic regression and its realised batch sizes (the progress line)",\n',
            "",
            CONFIG.format("cross_attention:retrieval"),
        ),
        "words are biased by exact attention": (
            '{"sketch": functools.partial(memory_scores, memories["sketch"])}',
            '{"sketch": lambda q: exact_scores(data._replace(queries=q), values, 1.0)}',
            "tests/experiments/test_answers.py::test_words_are_biased_by_what_was_released",
        ),
    },
    "experiments/cross_attention/table.py": {
        "how many private rows lie outside the domain is printed with the result": (
            "            log.say(\n",
            "            (lambda words, shown: print(words))(\n",
            "tests/experiments/test_cross_attention_experiments.py"
            "::test_the_owner_hears_of_rows_that_are_moved_into_the_domain",
        ),
        "a released table has a key that anybody can make": (
            'keys.noise("sketch"),',
            "jax.random.key(0),",
            CONFIG.format("cross_attention:table"),
        ),
        "a memory resumes with other values and the same noise": (
            "data=(K, V))",
            "data=(K,))",
            "tests/runs/test_privacy_records.py::test_experiments_without_training_know_their_data[memory]",
        ),
        "the bound of keys is no larger than the private keys": (
            "        key_bound=config.key_bound,\n",
            "        key_bound=min(config.key_bound, float(np.abs(K).max())),\n",
            CONFIG.format("cross_attention:table"),
        ),
    },
    "experiments/cross_attention/token_memory.py": {
        "a memory of texts is clipped at a quantile of private documents": (
            "for x in sums(public)]",
            "for x in sums(rows)]",
            CONFIG.replace(",", ":").format("next_tokens"),
        ),
        "that a memory of texts rests on public documents is no assumption": (
            'assumed = ("the pretrained model and the public documents do not depend on the data",)',
            "assumed = ()",
            "tests/experiments/test_plans.py::test_a_run_costs_what_its_plan_says[next_tokens:tiny]",
        ),
        "that a user has one identifier is no assumption of a memory of their texts": (
            '(users.ASSUMPTION,) if unit == "user" else ()',
            "()",
            "tests/experiments/test_next_tokens.py"
            "::test_a_guarantee_of_users_assumes_that_each_has_one_identifier",
        ),
    },
    "experiments/cross_attention/votes.py": {
        "votes have noise for one query": (
            "sensitivity=change * np.sqrt(num_queries) * (1 + 1e-6)",
            "sensitivity=change * (1 + 1e-6)",
            CONFIG.format("cross_attention:retrieval"),
        ),
        "of the nearest documents one comes, and none goes": (
            "return 1.0 if self.neighbours is None else np.sqrt(2)",
            "return 1.0",
            "tests/experiments/test_votes.py"
            "::test_a_document_moves_the_votes_of_the_nearest_by_what_is_declared",
        ),
        "which documents are nearest follows from how sums are rounded": (
            "np.rint(np.ldexp(x.astype(np.float64), _BITS)) for x in",
            "x for x in",
            "tests/experiments/test_votes.py::test_the_order_of_two_documents_depends_on_no_third_one",
        ),
    },
    "experiments/dp_transformer/choice.py": {
        "a user moves the choice of what is served by ten times what is declared": (
            "sensitivity=1 + 2**-20,",
            "sensitivity=0.1,",
            WORST.format("lead, up"),
        ),
    },
    "experiments/dp_transformer/classifier.py": {
        "how far a text is filled up follows from the longest one of all": (
            "np.maximum(mask.sum(axis=1), 1)",
            "np.maximum(mask.sum(axis=1).max() + 0 * mask.sum(axis=1), 1)",
            "tests/experiments/test_classify.py::test_features_are_those_of_a_text_alone[gemma3]",
        ),
    },
    "experiments/dp_transformer/classify.py": {
        "the mean of the features is released beside a training that has the whole budget": (
            "        beside=beside,\n",
            "        beside=None,\n",
            "tests/experiments/test_classify.py::test_the_mean_that_is_subtracted_is_paid_for",
        ),
        "a classifier goes on with other words of the same tokens": (
            "begun = [*tokens, *counted, train.labels",
            "begun = [*tokens, train.labels",
            "tests/experiments/test_classify.py::test_a_run_goes_on_with_the_same_words_alone",
        ),
        "class means count a user as often as they have texts": (
            "    return of_labels / np.bincount(train.users)[train.users, None]\n",
            "    return of_labels\n",
            WORST.format("class sums, a user"),
        ),
    },
    "experiments/dp_transformer/corpus.py": {
        "token probabilities count a user as often as they have records": (
            "        if self.train.users is not None:\n",
            "        if False:\n",
            CONFIG.format("friends:users"),
        ),
    },
    "experiments/dp_transformer/documents.py": {
        "held-out documents are trained on": (
            "train, test = train.take(order[held_out:]), train.take(order[:held_out])",
            "train, test = train.take(order), train.take(order[:held_out])",
            "tests/experiments/test_finetune.py::test_doors_of_data",
        ),
        "each document of an author is a record, and is called a user": (
            "return own.load_texts(path, record=data.record, column=data.column, user=data.user)",
            "return own.load_texts(path, record=data.record, column=data.column)",
            "tests/experiments/test_finetune.py::test_doors_of_data",
        ),
    },
    "experiments/dp_transformer/feature_center.py": {
        "a user of many texts moves the mean of the features by each of them": (
            "return sums / np.bincount(users)[:, None]",
            "return sums",
            WORST.format("center, a user"),
        ),
        "a long vector of features moves their mean by its length": (
            "    wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)\n",
            "",
            WORST.format("center, a text"),
        ),
    },
    "experiments/dp_transformer/finetune.py": {
        "n-gram models of documents do not say what they rest on": (
            "model._replace(guarantee=model.guarantee.assuming(*_assumptions(config)))",
            "model._replace(guarantee=model.guarantee)",
            PLANNED.format("finetune:pretrained"),
        ),
        "a score is divided by the number of training documents": (
            "record_probability.sensitivity(test.num_units)}",
            "record_probability.sensitivity(train.num_units)}",
            SCORED.format("finetune:pretrained"),
        ),
        "a held-out user moves the score of a selection with each record": (
            "record_probability.score(-nats, lengths, test.users)",
            "record_probability.score(-nats, lengths)",
            SCORED.format("finetune:users"),
        ),
        "the sampling probability of tuning counts documents that are held out": (
            "config.train, config.epsilon, config.delta, train.num_units, unit, _assumptions(config)",
            "config.train, config.epsilon, config.delta, train.num_units + "
            "len(test), unit, _assumptions(config)",
            PLANNED.format("finetune:pretrained"),
        ),
        "held-out documents may change while a selection among tuned models runs": (
            "return (*train.arrays, *test.arrays, *tuned_text.model_files(config))",
            "return (*train.arrays, *tuned_text.model_files(config))",
            SCORED.format("finetune:pretrained"),
        ),
        "the file of a model that is tuned may change while a run is resumed": (
            "return (*train.arrays, *test.arrays, *tuned_text.model_files(config))",
            "return (*train.arrays, *test.arrays)",
            "tests/experiments/test_public_files.py::test_texts_are_read_by_a_model",
        ),
        "n-grams of documents are clipped at the longest document": (
            "longest = 6 * config.data.length  # more characters of a training text are not counted",
            "longest = max(map(len, train.texts(language.tokenizer)))",
            "tests/experiments/test_finetune.py::test_ngrams_are_clipped_at_a_length_that_no_document_chooses",
        ),
        "how many documents users have decides what is rounded twice": (
            "if language.model().first_adapted and train.users is None and len(train) < reads:",
            "if language.model().first_adapted and len(train) < reads:",
            "tests/experiments/test_finetune.py"
            "::test_how_many_documents_users_have_decides_nothing[20]",
        ),
    },
    "experiments/dp_transformer/histories.py": {
        "the last item of every user is trained on": (
            "train = known if config.data.train_on_validation else split.train",
            "train = load(config)",
            LEDGER["recommender"],
        ),
        "histories are as wide as the longest user": (
            "    length = config.data.max_length\n",
            "    length = min(config.data.max_length, max(map(len, train.items)))\n",
            ONE_RECORD.format("histories"),
        ),
        "that a loader filters by its own k-core is no assumption": (
            "filtered = published_filtered or data.min_count is None or data.min_count > 0",
            "filtered = published_filtered or bool(data.min_count)",
            "tests/experiments/test_reading_histories.py::test_the_filter_of_a_loader_is_an_assumption_too",
        ),
    },
    "experiments/dp_transformer/labelled_texts.py": {
        "the labels that there are follow from the records": (
            "    texts, numbers = list(texts), _numbers(config)\n",
            "    texts = list(texts)\n"
            "    numbers = {x: n for n, x in enumerate(sorted({str(one.label) for one in texts}))}\n",
            "tests/experiments/test_classify.py"
            "::test_labels_are_those_that_are_named_and_not_those_that_there_are",
        ),
    },
    "experiments/dp_transformer/language_model.py": {
        "held-out texts may change while a selection runs": (
            "texts = corpus.train, corpus.test",
            "texts = (corpus.train,)",
            SCORED.replace(",", ":").format("text"),
        ),
        "the prior is missing from the total": (
            "composed=releases | once,",
            'composed={row: spent for row, spent in (releases | once).items() if row != "start"},',
            LEDGER["text"],
        ),
        "the token probabilities of a text run have the name of its prior": (
            'keys.noise("token probabilities")',
            'keys.noise("prior")',
            LEDGER["text"],
        ),
        "all n-grams have the same noise": (
            """for order in compared_ngrams(config):
        row = f"dp_{order}gram"
        model = _fit_ngram(keys.noise(row),""",
            """key = keys.noise("n-grams")
    for order in compared_ngrams(config):
        row = f"dp_{order}gram"
        model = _fit_ngram(key,""",
            SHARED.format("quickstart:tiny"),
        ),
        "test records are trained on": (
            "    train = corpus.train\n    params = training.train(",
            "    both = np.concatenate([corpus.train.tokens, corpus.test.tokens])\n"
            "    train = type(corpus.train)(both, corpus.train.end)\n"
            "    params = training.train(",
            LEDGER["text"],
        ),
        "the row without privacy is chosen by the test records": (
            'f"{kind}_tried{number}").nats(held_out)',
            'f"{kind}_tried{number}").nats(corpus.test)',
            "tests/experiments/test_without_privacy.py::test_a_way_is_chosen_by_training_records_that_it_was_not_trained_on",
        ),
        "a score of texts is divided by the number of training records": (
            "record_probability.sensitivity(corpus.test.num_units)",
            "record_probability.sensitivity(corpus.train.num_units)",
            SCORED.replace(",", ":").format("text"),
        ),
        "that a row of a language model is not private is not said": (
            '    "the row of the model without privacy, and how it was chosen",\n',
            "",
            "tests/experiments/test_plans.py::test_a_run_costs_what_its_plan_says[quickstart:tiny]",
        ),
        "the n-gram start of users is that of their records": (
            "        users=corpus.train.users,\n",
            "",
            CONFIG.format("friends:users"),
        ),
    },
    "experiments/dp_transformer/models.py": {
        "token probabilities are missing from the ledger": (
            'beside = own if prior is None else {"prior release": prior, **own}',
            'beside = own if prior is None else {"prior release": prior}',
            LEDGER["recommender"],
        ),
        "the choice of what is served is not deducted from the budget": (
            'own = {} if choice is None else {"choice of a model": choice}',
            "own = {}",
            LEDGER["recommender"],
        ),
        "that token probabilities of a file are public is no assumption": (
            "        assumptions = (\n            *assumptions,\n"
            '            "the token probabilities of config.reattention.path are public",\n        )\n',
            "        pass\n",
            "tests/experiments/test_reattention_experiment.py::test_public_probabilities_are_read_and_checked",
        ),
    },
    "experiments/dp_transformer/pieces.py": {
        "the last users are ranked in an array of another shape": (
            "np.arange(start, start + size) % count",
            "np.arange(start, min(start + size, count))",
            "tests/experiments/test_candidates.py::test_no_user_moves_a_metric_by_more_than_is_declared",
        ),
        "the last texts are read in an array of another shape": (
            "np.arange(start, start + size) % count",
            "np.arange(start, min(start + size, count))",
            "tests/experiments/test_classify.py::test_rows_are_always_read_as_many_at_a_time",
        ),
    },
    "experiments/dp_transformer/ranking.py": {
        "a ranking's score has half of its sensitivity": (
            "most = (1 + 2**-20) / _watch",
            "most = (0.5 + 2**-20) / _watch",
            SCORED.format("recommender:table"),
        ),
        "a ranking's mean is taken in 32 bits": (
            "name: math.fsum(own.tolist()) / _watch",
            "name: float(np.sum(own.astype(np.float32))) / _watch",
            "tests/experiments/test_candidates.py::test_no_user_moves_a_metric_by_more_than_is_declared",
        ),
    },
    "experiments/dp_transformer/recommender.py": {
        "the model without privacy gives a private row its output bias": (
            "bias, start, prior = recommender_rows.prior(config, prepared.train, key)\n",
            "_, start, prior = recommender_rows.prior(config, prepared.train, key)\n"
            "        bias = exact\n",
            LEDGER["recommender"],
        ),
        "that a user has one identifier is no assumption of recommenders": (
            "    users.ASSUMPTION,\n",
            "",
            "tests/runs/test_experiments.py"
            "::test_every_guarantee_of_a_recommender_names_the_filter[recommender:amazon,tiny-0]",
        ),
    },
    "experiments/dp_transformer/recommender_plain.py": {
        "the model without privacy starts from a private release": (
            "start = warm_start.exact(train, config)",
            'start, _ = warm_start.fit(repetition.noise("prior"), train, config, 1.0)',
            "tests/experiments/test_without_privacy.py::test_a_recommender_without_privacy_starts_from_exact_counts",
        ),
    },
    "experiments/dp_transformer/recommender_rows.py": {
        "the prior of a recommender is missing from its row's ledger": (
            "        prior=prior,\n        correction_key",
            "        prior=None,\n        correction_key",
            LEDGER["recommender"],
        ),
        "two repetitions of a recommender have one name": (
            'return self.keys.noise(f"{release}{self.suffix}")',
            "return self.keys.noise(release)",
            SHARED.format("recommender:synthetic,tiny"),
        ),
        "what is served is chosen by held-out items without noise": (
            "lead = choice.lead(key, config, *values)",
            "lead = float((values[0] - values[1]).sum())",
            LEDGER["recommender"],
        ),
        "the choice of what is served has the key of the popularity": (
            'key, values = repetition.noise("choice"),',
            'key, values = repetition.keys._key("release", f"dp_popularity{repetition.suffix}"),',
            LEDGER["recommender"],
        ),
        "the trained model is served where it is worse": (
            "    if lead > 0:\n",
            "    if True:\n",
            "tests/experiments/test_choice.py::test_a_model_that_training_made_worse_is_not_served",
        ),
        "the warm start's share is not deducted": (
            "        prior=prior,\n        correction_key",
            "        prior=None if model.start else prior,\n        correction_key",
            LEDGER["recommender, warm"],
        ),
        "the warm start and the release of transitions have one key": (
            'config, key = repetition.config, repetition.noise("transitions")',
            'config, key = repetition.config, repetition.noise("prior")',
            LEDGER["recommender, warm"],
        ),
        "a plan forgets all seeds but the first": (
            "for number in range(1, config.num_seeds))]",
            "for number in range(1, 1))]",
            PLANNED.format("recommender:synthetic"),
        ),
        "without a share for it, the popularity from which a private model starts is exact": (
            "    model = new_model(repetition, bias, start)\n    begun = None",
            "    exact = np.log1p(popularity.count(repetition.prepared.train))\n"
            "    model = new_model(repetition, exact if start is None and bias is None else bias, start)\n"
            "    begun = None",
            CONFIG.format("recommender:synthetic"),
        ),
    },
    "experiments/dp_transformer/text_model.py": {
        "a score counts a user as often as they have held-out records": (
            "score = record_probability.score(found, records.mask.sum(axis=1), records.users)",
            "score = record_probability.score(found, records.mask.sum(axis=1))",
            SCORED.format("friends:users"),
        ),
    },
    "experiments/dp_transformer/training.py": {
        "two rows of a run share noise and samples": (
            "keys=keys.training(label, secure",
            'keys=keys.training("row", 0, secure',
            LEDGER["text"],
        ),
        "a secure config draws from JAX's generator, and its guarantee says otherwise": (
            'secure=privacy is not None and config.get("secure", False)',
            "secure=False",
            SECURE + "test_the_section_of_a_config_draws_from_streams",
        ),
    },
    "experiments/dp_transformer/warm_start.py": {
        "the warm start spends the whole budget": (
            "whole / math.sqrt(budget_fraction)",
            "whole",
            "tests/experiments/test_warm_start.py::test_release_and_training_cost_the_budget_together",
        ),
    },
    "experiments/dp_transformer/without_privacy.py": {
        "the worst of the tried ways stands in the row without privacy": (
            "np.array(values) if more_is_better else -np.array(values)",
            "-np.array(values) if more_is_better else np.array(values)",
            "tests/experiments/test_without_privacy.py::test_the_best_way_wins",
        ),
        "numbers of private data that choose the row without privacy are shown although logs are of others": (
            'log.say(f"without privacy, {way}: {values[-1]:.4g}", shown=True)',
            'print(f"without privacy, {way}: {values[-1]:.4g}", file=log.sys.stderr)',
            "tests/experiments/test_without_privacy.py::test_the_best_way_wins",
        ),
    },
    "experiments/gram/attention_error.py": {
        "the samples that a run plans are those of real numbers": (
            "        gram.max_samples,",
            "        lambda *budget, **terms: gram.accounting.ideal_samples(\n"
            "            *budget, gram.accounting.Sampling(**terms)\n"
            "        ),",
            "tests/experiments/test_gram_experiment.py"
            "::test_the_error_experiment_runs_draws_and_ranks_the_mechanisms",
        ),
    },
    "experiments/gram/features.py": {
        "two Gram matrices have one key": (
            'keys.noise("gram_features")',
            'keys._key("release", "gram")',
            CONFIG.format("gram:features"),
        ),
        "what a Gram matrix of features gives does not say what it rests on": (
            "spent.assuming(ASSUMED) for",
            "spent for",
            PLANNED.format("gram:features"),
        ),
        "the row of a regression without noise is not named as such": (
            '    "the row exact, which is not private",\n',
            "",
            CONFIG.format("gram:features"),
        ),
        "products of the power method are rounded to 32 bits before their noise": (
            "            exact @ basis,\n",
            "            np.asarray(exact @ basis, np.float32),\n",
            WORST.format("power method"),
        ),
        "the power method starts from the exact components": (
            'start, row = leading(matrices["public"], count)',
            'start, row = leading(matrices["exact"], count)',
            CONFIG.format("gram:features"),
        ),
    },
    "experiments/gram/one_release.py": {
        "two repetitions of one-shot recommenders have one name": (
            'noise = lambda row, suffix=suffix: keys.noise(f"{row}{suffix}")',
            "noise = lambda row: keys.noise(row)",
            SHARED.format("gram:recommender,tiny"),
        ),
        "the last item of a user is released, and then asked for": (
            "known = split.train_and_validation if testing else split.train",
            "known = recommender_data.load(config) if testing else split.train",
            "tests/experiments/test_reading_histories.py::test_the_item_that_is_asked_for_was_not_released",
        ),
    },
    "experiments/gram/own_matrix.py": {
        "the error bound of a Gram matrix looks at the exact matrix": (
            "largest = float(np.abs(matrix).max()) + entry_error",
            "largest = float(np.abs(X @ X.T).max())",
            CONFIG.format("gram:table"),
        ),
    },
    "experiments/noisy_head/texts.py": {
        "without a public corpus, document frequencies are of private documents": (
            "frequencies = newsgroups.document_frequencies(public) if public else None",
            "frequencies = newsgroups.document_frequencies(public or texts)",
            ONE_RECORD.format("prompts"),
        ),
        "prompts that are held out are trained on": (
            "train, test = (x[tests:], y[tests:]), (x[:tests], y[:tests])",
            "train, test = (x, y), (x[:tests], y[:tests])",
            "tests/experiments/test_noisy_head_experiments.py::test_own_prompts",
        ),
    },
}

FAULTS = tuple(
    Fault(name, file, *patch)
    for file, patches in PATCHES.items()
    for name, patch in patches.items()
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
