"""Every benchmark runs, at sizes that take seconds: what they print is on the pages with their commands."""

import pytest
from command_line import ROOT, call

# Of each its flags here; those with a working folder are told one.
COMMANDS = {
    "accelerator": ["--tiny", "--repeats=1", "--seconds=20"],
    "blocks": ["--workdir", "--events=1000", "--shards=2", "--items=50", "--workers=1"],
    "by_hand": ["--repeats=1"],
    "clipping": [
        "--workdir", "--shapes=mlp", "--batch=2", "--methods=dpx auto,vmap(grad)", "--repeats=5",
    ],
    "costs": ["--shapes=recommender"],
    "cross_attention": ["--rows=1000", "--queries=100", "--repeats=1"],
    "depth": ["--workdir", "--blocks=1,2", "--repeats=1"],
    "gram": ["--columns=1000"],
    "hugging_face": [],
    "memories": ["--rows=100", "--epsilons=3"],
    "noise": ["--size=65536", "--runs=10", "--repeats=1"],
    "noisy_head": ["--trials=2", "--num_prompts=50"],
    "optimizers": ["--tiny", "--tasks=digits", "--seeds=2", "--epochs=2"],
    "plan": ["--tiny", "--tasks=digits", "--seeds=1", "--epochs=2"],
    "reattention": ["--items=50", "--batch=4", "--repeats=3"],
    "scaling": ["--repeats=3"],
    "truncation": [],
    "tuning": ["--tricks=kept", "--turns=1"],
}  # fmt: skip

NEEDED = {"hugging_face": "torch"}  # what is no extra of the project

MODULES = {path.stem for path in (ROOT / "experiments/bench").glob("[!_]*.py")} - {"shapes"}


def test_no_benchmark_is_left_out():
    assert COMMANDS.keys() == MODULES


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "clipping" else pytest.mark.slow)
        for name in sorted(COMMANDS)
    ],
)
def test_a_benchmark_runs(name, tmp_path):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    flags = [f"--workdir={tmp_path}" if flag == "--workdir" else flag for flag in COMMANDS[name]]
    ended = call(f"bench.{name}", *flags)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(ended.stdout.splitlines()) > 1
