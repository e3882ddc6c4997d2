"""The comparison of clipping norms and noises at equal ε: every choice trains, and stands in the table."""

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.dp_transformer import noise_choices


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["clip", "noise"])
def test_every_choice_is_trained_and_stands_in_the_table(choice, capsys, monkeypatch):
    if choice == "noise":
        pytest.importorskip("jax_privacy")
    full = noise_choices.digits
    monkeypatch.setattr(
        noise_choices,
        "digits",
        lambda: (task := full())._replace(settings=task.settings | {"steps": 8}),
    )
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(task="digits", seeds=1, epsilon=8.0, choice=choice):
        noise_choices.main([])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[3:]]
    assert len(rows) == {"clip": 9, "noise": 4}[choice]
    assert all(10 < float(row[2].split("±")[0]) <= 100 for row in rows)
    assert [bool(row[3].strip()) for row in rows] == ["adaptive" in row[1] for row in rows]
