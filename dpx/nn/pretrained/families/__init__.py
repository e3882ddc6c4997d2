"""Families of models: the settings in config.json and the names of arrays of each."""

from dpx.nn.pretrained.families import decoders, encoders
from dpx.nn.pretrained.families.family import Family

FAMILIES: dict[str, Family] = decoders.FAMILIES | encoders.FAMILIES

__all__ = ["FAMILIES", "Family"]
