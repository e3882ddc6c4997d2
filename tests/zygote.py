"""Starts command lines of the project in a fraction of the time that importing JAX takes.

One process imports the project, before JAX has started a backend, and forks a child for each command line.
A child can kill itself just before its n-th file operation below a folder: the moments at which a
process that dies leaves something behind.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OPERATIONS = {
    "open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod",
    "shutil.rmtree",
}  # fmt: skip


class Zygote:
    """`start` runs a command line and returns its exit status, stderr and number of file operations."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error):
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def start(self, module, *arguments, folder, kill_at=0):
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"module": module, "arguments": [str(a) for a in arguments], "kill_at": kill_at}
        self._process.stdin.write(json.dumps({**job, "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        done = json.loads(self._process.stdout.readline())
        return done["status"], done["stderr"], done["operations"]


def _child(job, report, errors):
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event not in _OPERATIONS or not arguments or isinstance(arguments[0], int):
            return
        if os.fsdecode(arguments[0]).startswith(job["folder"]):
            count += 1
            os.pwrite(report, b"%12d" % count, 0)
            if count == job["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

    import runpy

    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.addaudithook(watch)
    sys.argv = [job["module"], *job["arguments"]]
    status = 0
    try:
        if job["module"] in ("run", "sweep", "report") or "." in job["module"]:
            name = f"experiments.{job['module']}"
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            from dpx._command import main

            main(job["module"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _main():
    import tempfile

    sys.path.insert(0, str(ROOT))
    from jax._src import xla_bridge

    from dpx.runs import main  # noqa: F401
    from experiments.dp_transformer import language_model, recommender  # noqa: F401

    assert not xla_bridge.backends_are_initialized(), "a backend's threads do not survive a fork"
    for line in sys.stdin:
        with tempfile.TemporaryFile() as report_file, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if not child:
                _child(json.loads(line), report_file.fileno(), errors.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            errors.seek(0)
            done = {
                "status": status,
                "stderr": errors.read().decode(),
                "operations": int(report_file.read() or 0),
            }
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    _main()
