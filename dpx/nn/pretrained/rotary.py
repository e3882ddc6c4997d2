"""The rotary positions that the settings in a file describe."""

import math

from dpx.nn.pretrained.file_settings import Keys
from dpx.nn.pretrained.settings import Rotary


def read(keys: Keys, width: int, theta: float = 10000.0) -> Rotary:
    """The rotary positions of `rope_parameters`, or of `rope_theta` and `rope_scaling` in older files.

    Args:
      keys: The settings of config.json.
      width: D, the width of a head.
      theta: The base if the file states none.

    Raises:
      ValueError: for an unknown scaling.
    """
    theta = keys.number("rope_theta", theta)
    if (parameters := keys.part("rope_parameters")) is not None:
        return described(parameters, width, theta)
    scaling = keys.part("rope_scaling")
    return Rotary(theta) if scaling is None else described(scaling, width, theta)


def described(keys: Keys, width: int, theta: float) -> Rotary:
    """The rotary positions of one set of parameters.

    "linear" divides all frequencies by one factor (arXiv 2306.15595). "llama3" divides low frequencies, keeps
    high ones, and interpolates between the two (arXiv 2407.21783).
    """
    kind = keys.read("rope_type", None) or keys.read("type", "default")
    theta = keys.number("rope_theta", theta)
    factors = None
    if kind == "linear":
        factors = (keys.number("factor"),) * (width // 2)
    elif kind == "llama3":
        factors = _llama3(keys, width, theta)
    elif kind != "default":
        raise keys.wrong("rope_type", kind, "must be default, linear or llama3")
    keys.close(("type",), {"partial_rotary_factor": 1.0, "factor": 1.0})
    return Rotary(theta, factors)


def _llama3(keys: Keys, width: int, theta: float) -> tuple[float, ...]:
    factor, length = keys.number("factor"), keys.size("original_max_position_embeddings")
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    if high <= low:
        raise keys.wrong("high_freq_factor", high, f"must be more than low_freq_factor={low}")

    def divisor(pair: int) -> float:
        # The number of full turns of a pair within the length of pretraining.
        turns = length * theta ** (-2 * pair / width) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0), 1)
        return 1 / ((1 - kept) / factor + kept)

    return tuple(divisor(pair) for pair in range(width // 2))
