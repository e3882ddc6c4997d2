"""Families of models: how config.json describes one, and by which names its arrays go."""

from dpx.nn.pretrained.families import decoders, encoders
from dpx.nn.pretrained.families.family import Family

FAMILIES: dict[str, Family] = decoders.FAMILIES | encoders.FAMILIES

__all__ = ["FAMILIES", "Family"]
