"""`dpx configs` and `dpx run --config=NAME --help`: every key of every config has a meaning, in one place."""

import re

import pytest
from all_configs import all_sources
from command_line import call

from configs import common
from dpx.runs import listing, sources


def test_every_key_has_a_meaning_and_every_meaning_a_key():
    used = {name: {"experiment"} for name in sources.names()}
    for source in (re.sub("[:,]tiny$", "", source) for source in all_sources()):
        found = listing.keys(source)
        assert not [key.name for key in found if not key.meaning], source
        used[source.partition(":")[0]] |= {key.name for key in found}
    assert common.MEANINGS.keys() <= set().union(*used.values())
    meanings = {name: sources.config_module(name).MEANINGS for name in used}
    for name, own in meanings.items():
        # What a config takes over from another, and what all share, may have keys that it has not.
        taken = (common.MEANINGS, *(meanings[other] for other in used if other != name))
        new = {k for k, words in own.items() if all(words != others.get(k) for others in taken)}
        assert new <= used[name], name


def test_defaults_are_shown_as_a_command_line_takes_them():
    shown = {key.name: key.default for key in listing.keys("quickstart")}
    assert list(shown)[:4] == ["epsilon", "delta", "seed", "noise_seed"]
    assert shown["epsilon"] == "3"
    assert shown["delta"] == "1e-05"
    assert shown["ngrams"] == "(1,2,3,4)"
    assert shown["data.path"] == "<str>"
    (faults,) = [key for key in listing.keys("audit:train,tiny") if key.name == "faults"]
    assert faults.default.endswith(",)")


def test_the_overview_has_a_line_for_each_config_and_its_variants():
    lines = listing.overview().splitlines()
    for name in sources.names():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert len(line) <= 110
        assert listing.summary(name).endswith(".")
    assert "amazon_warm" in listing.overview()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_help_of_a_config_lists_its_keys(command):
    ended = call(command, "--config=gram:table", "--help")
    assert ended.returncode == 0, ended.stderr
    assert "--config.column_bound=<float>" in ended.stdout
    assert "l2 norm of a record" in ended.stdout
    assert "--workdir" in ended.stdout
    ended = call(command, "--config=gram:nothing", "--help")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "gram:nothing" not in call("configs").stdout
