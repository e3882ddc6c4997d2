"""`python -m experiments.report`: the same as `dpx report`."""

from _dpx_command import main

if __name__ == "__main__":
    main("report")
