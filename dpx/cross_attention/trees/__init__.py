"""The trees of Ke et al. (arXiv 2407.14717), corrected, for cross-attention, distances and sums.

`memory` builds a private memory, whose trees are described by `structures`. `distances` has the paper's
structures by themselves. `leaf_sums` computes exact integer sums of the leaves, `node_sums` releases nodes,
and `node_noise` derives their noise from the budget.
"""

from dpx.cross_attention.trees.distances import DPTree, DPTreeDistance, DPTreeHighDim
from dpx.cross_attention.trees.memory import Trees, build, choose_features, statistic

__all__ = [
    "DPTree",
    "DPTreeDistance",
    "DPTreeHighDim",
    "Trees",
    "build",
    "choose_features",
    "statistic",
]
