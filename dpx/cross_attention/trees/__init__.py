"""The trees of Ke et al. (arXiv 2407.14717): cross-attention, distances and sums, errata mended.

A memory (`memory`) is made of structures (`structures`) for distances (`distances`, also by themselves) and
for sums (`sums`). Leaves are exact sums of integers (`leaf_sums`), nodes are what is released (`node_sums`),
and their noise follows from the budget (`node_noise`).
"""

from dpx.cross_attention.trees.distances import DPTreeDistance, DPTreeHighDim
from dpx.cross_attention.trees.memory import Trees, build, choose_features, statistic
from dpx.cross_attention.trees.sums import DPTree

__all__ = [
    "DPTree",
    "DPTreeDistance",
    "DPTreeHighDim",
    "Trees",
    "build",
    "choose_features",
    "statistic",
]
