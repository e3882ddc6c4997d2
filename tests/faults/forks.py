"""Runs pytest on copies of the project, in processes forked after all but the project was imported."""

import json
import os
import subprocess
import sys
import tempfile


class Forks:
    """`run` runs some tests in a folder and returns pytest's status and output.

    All runs share the compiled programs of these tests, which are found by what they compute.
    """

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error):
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, folder, nodes):
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), list(nodes)]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _child(folder, nodes, output):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.path[0] = folder  # in place of this file's
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    status = pytest.main([*options, *nodes])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


def _main():
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized(), "a backend's threads do not survive a fork"
    assert not {"dpx", "experiments"} & set(sys.modules)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                _child(*json.loads(line), output.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([status, output.read().decode(errors="replace")]), flush=True)


if __name__ == "__main__":
    import dp_accounting.pld
    import dp_accounting.rdp  # noqa: F401
    import filelock  # noqa: F401
    import flax.nnx  # noqa: F401
    import hypothesis  # noqa: F401
    import jax  # noqa: F401
    import ml_collections  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import pytest
    import scipy.optimize
    import scipy.sparse.linalg
    import scipy.stats  # noqa: F401

    _main()
