"""`python -m experiments.run`: the same as `dpx run`."""

from dpx.launch import run

if __name__ == "__main__":
    run.start()
