"""`python -m experiments.sweep`: the same as `dpx sweep`."""

from _dpx_command import main  # type: ignore[import-not-found]  # dpx/_command, as installed

if __name__ == "__main__":
    main("sweep")
