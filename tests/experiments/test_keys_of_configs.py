"""Keys of releases follow from names, and not from an order; replays of configs say that none is shared."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Where experiments divide a key by number, and why no two releases share one for it.
BY_NUMBER = {
    "audit/canaries.py": "thousands of runs of one audit, on made-up data",
    "audit/training_faults.py": "a planted fault",
    "cross_attention/reader.py": "made-up tasks, of public training",
    "dp_transformer/distraction.py": "fresh noise in a finished model, which is not released",
    "gram/attention_error.py": "draws of an error, on made-up data",
    "gram/features.py": "steps of one release",
    "noisy_head/early_stopping.py": "simulated prompts, on which fits are paired",
    "noisy_head/excess_risk.py": "simulated prompts, on which fits are paired",
    "noisy_head/robustness.py": "simulated prompts, on which fits are paired",
}


def divided(path):
    """Whether a program divides a key, or the seed of samples, by number."""
    names = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    text = path.read_text()
    return bool({"fold_in", "spawn"} & names) or "random.split" in text


def test_experiments_do_not_divide_keys_by_number():
    """A copied number, or an order that changes, gives two releases one key; a name cannot."""
    found = {
        str(path.relative_to(ROOT / "experiments"))
        for path in (ROOT / "experiments").rglob("*.py")
        if "bench" not in path.parts and divided(path)
    }
    assert found == set(BY_NUMBER)
