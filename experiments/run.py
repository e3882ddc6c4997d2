"""`python -m experiments.run`: the same as `dpx run`."""

from dpx._command import main

if __name__ == "__main__":
    main("run")
