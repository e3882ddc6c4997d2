"""Recommenders from one private release each, and the measures of a ranking."""

from dpx.recommend import item_gram, metrics, popularity, transitions

__all__ = ["item_gram", "metrics", "popularity", "transitions"]
