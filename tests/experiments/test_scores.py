"""How far a held-out record moves the score of a selection, and what a run costs, beside its `Candidate`.

Every experiment that has candidates is run whole, but for training, on its held-out records, without some of
them, and with the worst that one can build: on which a model is certain, and so has all of the score.
"""

import dataclasses

import numpy as np
import pytest
from all_configs import all_sources, configured, executed

from dpx import audit
from dpx.data.records import num_units, of_units
from dpx.runs import records
from dpx.training import keys
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import documents as docs
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import ranking, record_probability, training

SOURCES = [
    s for s in all_sources() if hasattr(records.experiment(records.load_config(s)), "candidate")
]
ONE_MODEL = {"num_seeds": 1, "non_private.steps": 0, "train.batch_size": 16}
TEXT = {"ngrams": (), "non_private.steps": 0, "train.batch_size": 16, "train_loss": False}
TUNED = {"ngrams": (), "non_private.steps": 0, "train.batch_size": 16, "data.test_limit": 20}
CHANGES = {
    "finetune:pretrained,tiny": TUNED | {"data.record": "line"},
    **dict.fromkeys(("quickstart:tiny", "shakespeare:tiny", "text:tiny"), TEXT),
    **dict.fromkeys(("friends:users,tiny", "friends:lines,tiny"), TEXT),
    **{s: ONE_MODEL for s in SOURCES if s.startswith("recommender")},
}
OF_USERS = CHANGES["finetune:pretrained,tiny"] | {"data.user": "who"}
CASES = [(source, CHANGES[source]) for source in SOURCES]
CASES += [("finetune:pretrained,tiny", OF_USERS)]


def _histories(config, patch):
    """Users whose next item is held out; of the first one it is what every model of theirs ranks first."""
    prepare = recommender_data.prepare
    part = ("histories", "history_mask", "next_items", "users")

    def inject(kept):
        def prepared(config, start=None):
            found = prepare(config, start)
            arrays = {name: getattr(found, name)[kept] for name in part}
            return found._replace(seen=[found.seen[user] for user in kept], **arrays)

        patch.setattr(recommender_data, "prepare", prepared)

    count = len(prepare(config).next_items)
    # With as many places as items, everybody has all of a hit.
    config.evaluate.k = prepare(config).train.num_items
    config.evaluate.exclude_seen = False
    return inject, np.arange(count)


def _texts(config, patch):
    """Records or users, of whom the first have no token: they are certain."""
    corpus = corpora.load(config)
    test, first = _worst_first(corpus.test)
    mask = test.mask.copy()
    mask[first] = False

    def inject(kept):
        rows, users = of_units(test.users, kept)
        found = Masked(test.tokens[rows], mask[rows], users)
        patch.setattr(corpora, "load", lambda config: corpus._replace(test=found))

    return inject, np.arange(test.num_units)


@dataclasses.dataclass
class Masked:
    """Texts whose masks are their own."""

    tokens: np.ndarray
    mask: np.ndarray
    users: np.ndarray | None

    def __len__(self):
        return len(self.tokens)

    @property
    def num_units(self):
        return num_units(self.tokens, self.users)


def _documents(config, patch):
    load = docs.load
    _, test = load(config, docs.Bytes())
    test, first = _worst_first(test)
    mask = test.mask.copy()
    mask[first] = False

    def inject(kept):
        def loaded(config, tokenizer, **_):
            train, _ = load(config, tokenizer)
            return train, docs.Documents(test.tokens, mask, test.users).take(kept)

        patch.setattr(docs, "load", loaded)

    return inject, np.arange(test.num_units)


def _worst_first(test):
    """At most 20 records, or users, of whom the one with most records is first, and the rows of the first."""
    if test.users is None:
        return test.take(slice(20)), 0
    test = test.take(np.argsort(-np.bincount(test.users), kind="stable")[:20])
    return test, test.users == 0


def held_out(config):
    for module, found in (
        ("recommender", _histories),
        ("language", _texts),
        ("finetune", _documents),
    ):
        if module in config.experiment:
            return found
    raise AssertionError(f"{config.experiment} has candidates: say how a held-out record leaves it")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "changes"), CASES, ids=[*SOURCES, "finetune:users,tiny"])
def test_no_held_out_record_moves_a_score_by_more_than_its_candidate_says(
    source, changes, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "train", lambda loss, params, *rest, **more: params)
    config = configured(source, tmp_path, noise_seed=5, **changes)
    inject, everybody = held_out(config)(config, monkeypatch)

    def candidate(kept):
        inject(kept)
        return records.experiment(config).candidate(config)

    # The number of held-out records is public: a neighbour has an empty record in place of one.
    neighbours = [np.delete(everybody, gone) for gone in (0, 1, len(everybody) - 1)]
    # Nobody watches here, who would take what a candidate calls public for what the score does.
    planned, *others = map(candidate, (everybody, *neighbours))
    data, seen = [planned.data, *(other.data for other in others)], []
    assert planned.data not in data[1:]

    def whole(kept, workdir):
        inject(kept)
        with keys.only_of(data[len(seen)]):
            record = executed(config, source, workdir)
        scores = {name: record.metrics[f"{planned.row}/{name}"] for name in planned.sensitivities}
        seen.append(scores)
        # The run costs what its candidate says, and leaves the files of its model.
        stated, promised = record.releases[planned.row], planned.guarantee
        assert (stated["event"], stated["unit"]) == (str(promised.event), promised.unit)
        assert stated["epsilon"] == promised.epsilon
        assert {*stated["assumptions"]} <= {*promised.assumptions, *record.total["assumptions"]}
        assert {ranking.ASSUMPTION, record_probability.ASSUMPTION} & {*promised.assumptions}
        assert all((workdir / name).is_file() for name in planned.files)
        assert planned.synthetic == record.private["synthetic"]

    with audit.recording():
        first = audit.record(whole, everybody, ignore=["*"])
        for neighbour in neighbours:
            audit.replay(whole, everybody, neighbour, ignore=["*"], first=first)
    scores, *others = seen
    assert planned.sensitivities
    for name, most in planned.sensitivities.items():
        changes = [scores[name] - without[name] for without in others]
        assert all(abs(change) <= most for change in changes)
        if not name.startswith("ndcg"):  # whose worst user is ranked first
            assert changes[0] == pytest.approx(most, rel=1e-4)
