"""`python -m experiments.sweep`: the same as `dpx sweep`."""

from _dpx_command import main

if __name__ == "__main__":
    main("sweep")
