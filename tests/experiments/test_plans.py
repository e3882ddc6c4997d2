"""What `--dry_run` says that a run will cost is what the run then costs: every config and variant."""

import dataclasses
import re

import pytest
from all_configs import all_sources, configured, executed
from own_files import OWN_FILES, write_lines

from dpx.privacy import gaussian_epsilon, gaussian_noise_multiplier
from dpx.runs import records, run
from dpx.training import keys
from experiments.dp_transformer import training

# What every release of a run rests on, because of how the records are read.
READING = {
    "gram:features,tiny": "the public documents, which groups there are",
    "finetune": " the split, the sampling probability",
    "next_tokens": "the pretrained model and the public documents do not depend on the data",
    "quickstart": " the split, the sampling probability",
    "recommender": "the number of users, which set",
    "shakespeare": " the split, the sampling probability",
    "text": " the split, the sampling probability",
    "reattention": "the number of users, which set",
}

# Rows that follow from public data or from releases of other rows, and what others are called in words.
PUBLIC = ("pretrained", "public_attention", "public", "uniform", "zero")
# Experiments of which every number is said to be of data that are made up, or of none that is covered.
SIMULATED = (
    "dp_transformer.distraction",
    "noisy_head.early_stopping",
    "noisy_head.excess_risk",
    "noisy_head.robustness",
)
NAMED = dict.fromkeys(("transformer", "gru", "lstm", "tuned"), "without privacy")


def labels(mechanism):
    """Of what a ledger composed, as it says in words."""
    return sorted(mechanism.partition(" (composed")[0].split(", "))


@pytest.mark.slow
@pytest.mark.parametrize("source", list(all_sources()))
def test_a_run_costs_what_its_plan_says(source, tmp_path, monkeypatch):
    # Nothing is trained, which takes time and changes no guarantee.
    monkeypatch.setattr(training, "train", lambda loss, params, *rest, **more: params)
    drawn, draw = [], keys._draw
    monkeypatch.setattr(keys, "_draw", lambda: (drawn.append(1), draw())[1])
    config = configured(source, tmp_path)
    run.prepare(config, source, tmp_path / "run")
    total = run.compose(dict(run.plan(config).releases))
    assert not drawn
    record = run.execute(config, tmp_path / "run")
    spent = record.total
    assert spent["epsilon"] == pytest.approx(total.epsilon, rel=1e-6)
    assert spent["delta"] == pytest.approx(total.delta, rel=1e-6)
    assert (spent["neighboring"], spent["unit"]) == (total.neighboring.name.lower(), total.unit)
    assert labels(spent["mechanism"]) == labels(total.mechanism)
    if words := READING.get(source, READING.get(source.partition(":")[0])):
        for release in record.releases.values():
            assert any(words in said for said in release["assumptions"])
    # A row without a guarantee is about nobody's data, or is said to have none.
    words = " ".join(record.private["not_covered"])
    for measure in record.measures:
        if measure.row in PUBLIC or config.experiment in SIMULATED:
            continue
        if not {measure.row, measure.place} & set(record.releases):
            kind = NAMED.get(measure.row, measure.row.partition("_without_noise")[0])
            assert (
                "synthetic data" in words
                or "data are synthetic" in words
                or re.search(rf"\b{kind}\b", words)
            ), measure.name
    # Every row has a title, and is drawn.
    assert {measure.row for measure in record.measures} <= set(record.titles)
    other = dataclasses.replace(record, config=record.config | {"epsilon": 2 * config.epsilon})
    if hasattr(experiment := records.experiment(config), "figures"):
        for path in experiment.figures([record, other], tmp_path):
            assert path.stat().st_size > 1000
    # Only what is about nobody's data may have noise that everybody can repeat.
    assert record.private["synthetic"] == (not drawn)


# Files of data that are published: what a comparison with others costs on them is nobody's loss.
PUBLISHED = {
    "classify:newsgroups,tiny": "20 Newsgroups",
    "classify:reuters,tiny": "Reuters R8",
    "classify:sentences,tiny": "film reviews",
    "gram:recommender,tiny": "Amazon's ratings: likewise",
    "recommender:amazon,tiny": "Amazon's ratings",
    "recommender:amazon_warm,tiny": "Amazon's ratings",
    "recommender:movielens,tiny": "MovieLens, which a package carries",
    "recommender:movielens1m,tiny": "MovieLens",
    "shakespeare:tiny": "a play",
    "friends:users,tiny": "a series",
    "friends:lines,tiny": "a series",
}


def own(source, folder):
    """Changes by which a source reads data of one's own."""
    if source not in OWN_FILES:
        return {}
    given = OWN_FILES[source](folder, None)
    if OWN_FILES[source] is write_lines:
        given["data.record"] = "line"
    if source == "next_tokens:tiny":
        given["data.test_path"] = given["data.path"]
        given["num_classes"] = 4  # of the six tokens of its public documents
    return given


@pytest.mark.quick_cases("gram:features,tiny")
@pytest.mark.parametrize("source", list(OWN_FILES))
def test_files_of_ones_own_are_read(source, tmp_path):
    run.check(configured(source, tmp_path, **own(source, tmp_path)))


OWN = [
    source
    for source in all_sources()
    if "path" in records.load_config(source).get("data", {}) and source not in PUBLISHED
]


@pytest.mark.quick_cases("noisy_head:text,tiny", "gram:table,tiny")
@pytest.mark.parametrize("source", OWN)
def test_on_ones_own_data_a_run_spends_what_it_is_given(source, tmp_path, monkeypatch):
    config = configured(source, tmp_path, **own(source, tmp_path))
    run.check(config)
    total = run.compose(dict(run.plan(config).releases))
    assert total.epsilon == pytest.approx(config.epsilon, rel=5e-3)
    assert total.epsilon <= config.epsilon * (1 + 1e-6)
    if own(source, tmp_path):  # whose other tests are about data that come with dpx
        monkeypatch.setattr(training, "train", lambda loss, params, *rest, **more: params)
        record = executed(config, source, tmp_path / "run")
        assert record.total["epsilon"] == pytest.approx(total.epsilon, rel=1e-6)
    if source not in ("gram:table,tiny", "cross_attention:table,tiny", "finetune:scratch,tiny"):
        config.comparisons = True
        more = run.compose(dict(run.plan(config).releases))
        assert more.epsilon > 1.2 * config.epsilon


@pytest.mark.parametrize("source", OWN)
def test_a_config_releases_as_often_as_its_tiny_form(source):
    """The other tests here run the tiny forms alone."""
    whole, tiny = (
        records.load_config(s) for s in (source.replace(",tiny", "").replace(":tiny", ""), source)
    )
    for name in ("comparisons", "num_seeds", "neighboring"):
        assert whole.get(name) == tiny.get(name)
    for name in ("prior", "start", "reattention"):
        for field in ("enabled", "budget_fraction"):
            assert whole.get(name, {}).get(field) == tiny.get(name, {}).get(field)
    assert not whole.get("comparisons")
    assert whole.get("num_seeds", 1) == 1


def test_more_seeds_are_planned_for(tmp_path):
    """Three seeds of four releases, each for the whole budget but for a start that is part of a row."""
    config = configured("recommender:table,tiny", tmp_path, comparisons=True, num_seeds=3, seed=7)
    planned = run.plan(config).releases
    rows = {"dp_popularity", "start", "transitions", "dp_transformer"}
    assert set(planned) == rows | {f"{row}_seed{seed}" for row in rows for seed in (8, 9)}
    # Nine budgets, of which each is one Gaussian mechanism or close to one.
    nine = 1 / gaussian_noise_multiplier(config.epsilon, config.delta) * 3
    assert run.compose(dict(planned)).epsilon == pytest.approx(
        gaussian_epsilon(1 / nine, config.delta), rel=0.05
    )
