"""`python -m experiments.sweep`: the same as `dpx sweep`."""

from dpx._command import main

if __name__ == "__main__":
    main("sweep")
