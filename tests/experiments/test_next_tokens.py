"""A language model with a private memory: its mixture, its sensitivity, and a run with a random model."""

import jax
import numpy as np
import pytest

import dpx
from configs import next_tokens as configs
from dpx.training import users
from experiments.cross_attention import next_tokens, token_memory
from experiments.cross_attention.token_memory import Positions

LENGTH = 6


def drawn(count, config, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(count, LENGTH, config.dim))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True) * 1.0001
    classes = rng.integers(config.num_classes + 1, size=(count, LENGTH))
    return Positions(keys.astype(np.float32), classes, rng.random((count, LENGTH)) < 0.8)


@pytest.mark.slow
def test_a_run_with_a_random_model(tmp_path, monkeypatch):
    config, events, save = configs.get_config("tiny"), [], dpx.save
    next_tokens.validate(config)
    assert next_tokens.plan(config).parameters["features"] == 15

    def releasing(*arguments):
        events.append("release")
        return token_memory.release_memory(*arguments)

    def saving(*arguments):
        events.append("save")
        save(*arguments)

    monkeypatch.setattr(next_tokens, "release_memory", releasing)
    monkeypatch.setattr(dpx, "save", saving)
    outcome = next_tokens.run(config, tmp_path)
    assert events == 4 * ["release"] + ["save"]  # a run that is killed leaves no memory
    nats = {m.row: m.value for m in outcome.measures if m.metric == "nats_per_token"}
    assert nats["attention"] < nats["memory_no_noise"] < nats["frequencies"] < nats["pretrained"]
    assert nats["attention"] < nats["public_attention"] < nats["pretrained"]
    assert nats["memory"] == pytest.approx(nats["memory_no_noise"], abs=0.1)
    assert nats["both"] < nats["memory"]
    paid = {"memory", "memory_draw1", "frequencies", "frequencies_draw1"}
    assert set(outcome.releases) - {"both"} == set(outcome.composed) == paid
    assert {(spent.epsilon, spent.unit) for spent in outcome.releases.values()} == {
        (8.0, "document")
    }
    memory = next_tokens.load(config, tmp_path)
    assert memory.guarantee.mechanism == outcome.headline.mechanism
    assert memory.moments.shape == (15, 10)


@pytest.mark.slow
def test_all_that_a_user_wrote_is_one_record(tmp_path, monkeypatch):
    """Whose clipped part moves the sums: a text of theirs alone would do so as often as there are texts."""
    (tmp_path / "own.csv").write_text(
        "who,what\n" + "".join(f"u{i % 3},ab{i}\n" for i in range(12))
    )
    config = configs.get_config("tiny")
    path = str(tmp_path / "own.csv")
    config.data.update({"path": path, "test_path": path, "column": "what", "user": "who"})
    begun = []

    def opened(config, workdir, *, synthetic, data):
        begun.extend(data)
        raise KeyboardInterrupt

    monkeypatch.setattr(next_tokens.secrets, "open_keys", opened)
    with pytest.raises(KeyboardInterrupt):
        next_tokens.run(config, tmp_path)
    assert len(begun[0]) == 3


def test_a_guarantee_of_users_assumes_that_each_has_one_identifier():
    config = configs.get_config("tiny")
    assert users.ASSUMPTION not in token_memory.guarantee(config, "memory").assumptions
    config.data.user = "who"
    spent = token_memory.guarantee(config, "memory")
    assert spent.unit == "user"
    assert users.ASSUMPTION in spent.assumptions


def test_a_mixture_is_a_distribution():
    """Over a vocabulary of ten tokens, of which three are classes of their own."""
    rng = np.random.default_rng(0)
    model = rng.dirichlet(np.ones(10))
    tokens = np.arange(10)[:, None]
    positions = Positions(np.zeros((10, 1, 2)), np.minimum(tokens, 3), np.ones((10, 1), bool))
    asked = next_tokens.Asked(positions, np.log(model), np.full(10, model[3:].sum()))
    answers = np.tile(rng.dirichlet(np.ones(4)), (10, 1))
    for share in (0.0, 0.3, 0.9):
        found = np.exp(-next_tokens.mixed(asked, answers, share))
        assert found.sum() == pytest.approx(1)
        assert found[0] == pytest.approx((1 - share) * model[0] + share * answers[0, 0])
    np.testing.assert_allclose(np.exp(-next_tokens.mixed(asked, answers, 0.0)), model)


@pytest.mark.slow
def test_without_noise_and_clipping_it_is_attention():
    config = configs.get_config("tiny")
    config.update({"degree": 6, "largest_logit": 1.0, "epsilon": 1e8})
    rows = drawn(30, config)
    rows.mask[:] = True
    # No document is as long as the public one, which has each position twice.
    longer = Positions(*(np.repeat(array, 2, axis=1) for array in rows))
    total = token_memory.clipped_sum(config, rows, longer, config.degree)
    memory = token_memory.release_memory(config, jax.random.key(0), total)
    exact = token_memory.exact_attention(rows, config.num_classes + 1, config.largest_logit)
    queries = rows.asked[:20]
    np.testing.assert_allclose(memory.query(queries), exact(queries), atol=2e-3)


def test_classes_that_public_documents_lack_are_refused():
    config = configs.get_config("tiny")
    tokens = np.zeros((3, LENGTH), np.int32)
    documents = next_tokens.Documents(tokens, np.ones(tokens.shape, bool))
    states = np.random.default_rng(0).normal(size=(3, LENGTH, 8))
    with pytest.raises(ValueError, match=r"config\.num_classes=8 must be at most the 1 tokens"):
        token_memory.fit_reader(states, documents, config.dim, config.num_classes)
