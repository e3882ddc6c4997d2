"""`python -m experiments.sweep`: the same as `dpx sweep`."""

from dpx.launch import sweep

if __name__ == "__main__":
    sweep.start()
