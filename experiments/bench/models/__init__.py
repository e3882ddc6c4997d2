"""Clipping on models that others wrote, and on constructs of every framework: see `__main__`."""
