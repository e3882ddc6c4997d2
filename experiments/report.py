"""`python -m experiments.report`: the same as `dpx report`."""

from dpx._command import main

if __name__ == "__main__":
    main("report")
