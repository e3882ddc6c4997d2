"""`dpx configs` and `dpx run --config=NAME --help`: every key of every config has a meaning, in one place."""

import pytest
from command_line import call

from configs import common
from dpx.launch import listing, sources


def sources_of(name):
    variants = listing.variants(name)
    return [f"{name}:{variant}" for variant in variants] or [name]


@pytest.mark.parametrize("name", sources.names())
def test_every_key_has_a_meaning_and_every_meaning_a_key(name):
    found = {key.name: key for source in sources_of(name) for key in listing.keys(source)}
    assert not [key for key, about in found.items() if not about.meaning]
    meanings = sources.config_module(name).MEANINGS
    # What a config takes over from another, and what all share, may have keys that it has not.
    taken = [sources.config_module(other).MEANINGS for other in sources.names() if other != name]
    own = {
        key
        for key, words in meanings.items()
        if all(words != others.get(key) for others in (common.MEANINGS, *taken))
    }
    assert own <= found.keys()


def test_what_configs_share_is_of_some_config():
    used = {
        key.name for name in sources.names() for source in sources_of(name) for key in listing.keys(source)
    }  # fmt: skip
    assert common.MEANINGS.keys() <= used | {"experiment"}


def test_defaults_are_shown_as_a_command_line_takes_them():
    shown = {key.name: key.default for key in listing.keys("quickstart")}
    assert list(shown)[:4] == ["epsilon", "delta", "seed", "noise_seed"]
    assert shown["epsilon"] == "3"
    assert shown["delta"] == "1e-05"
    assert shown["ngrams"] == "(1,2,3,4)"
    assert shown["data.path"] == "<str>"
    assert {key.name: key.default for key in listing.keys("audit:train,tiny")}["faults"].endswith(
        ",)"
    )


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
