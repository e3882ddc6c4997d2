"""`python -m experiments.report`: the same as `dpx report`."""

from dpx.launch import report

if __name__ == "__main__":
    report.start()
