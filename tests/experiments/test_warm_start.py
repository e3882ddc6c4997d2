"""A model that starts from released transitions: its first logits, its budget, and misuse."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from flax import nnx

from configs.recommender import get_config
from dpx import privacy
from dpx.data import synthetic_histories
from dpx.recommend import transitions
from experiments.dp_transformer import choice, next_item, recommender, warm_start


@pytest.fixture(scope="module")
def histories():
    return synthetic_histories(500, 8, 40, predictability=0.7, seed=1)


@pytest.fixture
def config():
    config = get_config("synthetic,tiny")
    config.start.budget_fraction, config.popularity_budget_fraction = 0.8, 0.0
    config.num_seeds, config.noise_seed, config.non_private.steps = 1, 1, 0
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir, path = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("data") / "ratings.txt"
    with path.open("w") as file:
        for user, items in enumerate(synthetic_histories(80, 6, 40, seed=2).items):
            file.writelines(f"{user + 1} {item + 1}\n" for item in items)
    config = get_config("amazon_warm,tiny")
    config.data.path, config.num_seeds, config.noise_seed = str(path), 1, 1
    config.non_private.steps = 0
    recommender.validate(config)
    config.train.evaluate_every = 2
    return config, workdir, recommender.run(config, workdir)


@pytest.fixture(scope="module")
def start(histories):
    config = get_config("synthetic,tiny")
    config.epsilon, config.start.pseudo_counts, config.start.recency = 8.0, 7.0, 0.6
    return warm_start.fit(jax.random.key(0), histories, config, budget_fraction=0.5)[0]


@pytest.mark.slow
def test_logits_are_those_of_the_release_item_by_item(start, histories):
    tokens = np.array([[0, 0, 3, 5], [2, 1, 2, 0]])
    mask = np.array([[False, False, True, True], [True] * 4])
    logits = start.logits(tokens, mask, last_only=False)
    for user in range(2):
        for position in range(4):
            scores = 7.0 * np.exp(np.log(start.prior / 7.0))[start.items]
            for k, place in enumerate(range(position, -1, -1)):
                if mask[user, place]:
                    scores = scores + 0.6**k * start.weights[tokens[user, place]]
            np.testing.assert_allclose(logits[user, position], np.log(scores), rtol=1e-4)
    last = start.logits(tokens, mask, last_only=True)
    np.testing.assert_allclose(last[:, 0], logits[:, -1], rtol=1e-5)


@pytest.mark.slow
def test_items_beyond_the_release_have_their_popularity(start, histories):
    logits = jnp.zeros((2, len(start.items)))
    wide = start.widen(logits)
    assert wide.shape == (2, histories.num_items)
    rest = np.setdiff1d(np.arange(histories.num_items), start.items)
    assert len(rest) > 0
    np.testing.assert_allclose(wide[0, rest], np.log(start.prior[rest]), rtol=1e-5)
    np.testing.assert_array_equal(wide[:, start.items], logits)


def test_histories_keep_the_order_of_the_items_that_are_known(start, histories):
    known = start.restrict(histories)
    assert known.num_items == len(start.items)
    for items, tokens in zip(histories.items[:20], known.items, strict=False):
        kept = [item for item in items.tolist() if item in start.items]
        assert start.items[tokens].tolist() == kept


@pytest.mark.slow
def test_the_model_begins_as_the_start_and_can_move_away_from_it(start, config):
    graph, params = next_item.build(config, len(start.items), 0, None, start)
    tokens, mask = jnp.array([1, 2, 3]), jnp.ones(3, bool)
    logits = jax.jit(
        lambda p: next_item.logits(graph, None, start, p, tokens, mask, last_only=False)
    )(params)
    np.testing.assert_allclose(logits, start.logits(tokens, mask, False), rtol=1e-6)
    targets = jnp.array([2, 3, 4])
    loss = functools.partial(next_item.loss, graph, None, start, False)
    grads = jax.jit(jax.grad(loss))(params, tokens, targets, mask, mask, None)
    assert jnp.abs(nnx.to_pure_dict(grads)["norm"]["scale"]).max() > 0


@pytest.mark.slow
def test_release_and_training_cost_the_budget_together(finished):
    config, workdir, made = finished
    assert made.releases["transitions"].epsilon == pytest.approx(config.epsilon)
    guarantee = made.releases["dp_transformer"]
    assert 0.99 * config.epsilon <= guarantee.epsilon <= config.epsilon
    # The release costs what nine tenths of μ² of the budget do, choosing what is served a hundredth, and
    # training has the rest.
    planned = recommender.plan(config).parameters
    settings = {name: planned[name] for name in ("sampling_probability", "steps")}
    training = privacy.dpsgd_event(planned["noise_multiplier"], **settings)
    chosen = GaussianDpEvent(choice.noise_std(config))
    together = PLDAccountant().compose(made.releases["start"].event).compose(training)
    together = together.compose(chosen)
    assert together.get_epsilon(config.delta) == pytest.approx(guarantee.epsilon, rel=5e-3)
    whole, start = (made.releases[row].event.noise_multiplier for row in ("transitions", "start"))
    assert (whole / start) ** 2 == pytest.approx(0.9, rel=1e-6)
    for row in ("transitions", "start", "dp_transformer"):
        assert 0 <= made.metrics[f"{row}/ndcg@10"] <= 1
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["run"] == "dp_transformer" and "ndcg@10" in line][-1]
    assert last["step"] == config.train.steps
    assert last["ndcg@10"] == pytest.approx(made.metrics["dp_transformer/ndcg@10"])


@pytest.mark.slow
def test_reattention_starts_from_the_release_too(config, tmp_path):
    config.reattention.enabled = True
    made = recommender.run(config, tmp_path)
    assert made.releases["dp_reattention"].epsilon <= config.epsilon
    assert len(recommender.load(config, tmp_path).recommend([1, 2], 3, exclude_seen=False)) == 3


def embeddings(estimate, dim=4):
    release = transitions.Transitions(
        items=np.arange(len(estimate)),
        estimate=estimate,
        standard_error=np.full(estimate.shape, 0.1, np.float32),
        weights=estimate,
        log_popularity=np.zeros(len(estimate)),
        guarantee=None,  # type: ignore[arg-type]
    )
    return warm_start._embeddings(release, dim)


def test_embeddings_are_close_for_items_with_the_same_successors():
    # Items 0 and 1 lead to 2, and 3 and 4 to 5: the vectors of a pair point the same way.
    estimate = np.zeros((6, 6), np.float32)
    estimate[[0, 1], 2] = estimate[[3, 4], 5] = 100
    vectors = embeddings(estimate)
    assert vectors.shape == (6, 4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T
    assert min(cosines[0, 1], cosines[3, 4]) > 0.99
    assert abs(cosines[0, 3]) < 0.1


def test_embeddings_are_zero_beyond_the_rank_of_the_release():
    # As noise leaves it of few users: nothing, or a single transition.
    for size in (1, 6, 20):
        assert not embeddings(np.zeros((size, size), np.float32)).any()
    estimate = np.zeros((60, 60), np.float32)
    estimate[3, 7] = 9
    vectors = embeddings(estimate, dim=32)
    assert vectors.shape == (60, 32)
    assert np.isfinite(vectors).all()
    assert np.count_nonzero(vectors.any(axis=0)) == 1
    np.testing.assert_allclose(embeddings(estimate, dim=32), vectors, atol=1e-9)


@pytest.mark.slow
def test_a_table_whose_release_is_noise_alone_is_run_and_planned(tmp_path):
    rows = np.random.default_rng(1).integers(10, size=(20, 5))
    lines = [f"{user},{item}\n" for user, items in enumerate(rows) for item in items]
    (tmp_path / "table.csv").write_text("user,item\n" + "".join(lines))
    config = get_config("table,tiny")
    config.data.path, config.epsilon, config.noise_seed = str(tmp_path / "table.csv"), 0.01, 1
    config.num_seeds, config.non_private.steps = 1, 0
    recommender.validate(config)
    recommender.plan(config)
    assert recommender.candidate(config).row == "served"
    made = recommender.run(config, tmp_path / "run")
    assert made.releases["dp_transformer"].epsilon <= config.epsilon
