"""One of several processes of a private training: ADDRESS COUNT NUMBER FOLDER STEP CLIP UNIT.

It is killed at the step, if that is not 0, and clips to the given norm. UNIT is one of `fit_cases.UNITS`.

`tests/training/test_processes.py` starts them all, and says what must hold.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

import dpx
from dpx.training.layout import share, whole
from dpx.training.log import Progress


def main(address, count, number, folder, step, clip, unit):
    jax.distributed.initialize(address, int(count), int(number))
    line = Progress.line

    def killed(self, done, *rest):
        if done == int(step):
            os.kill(os.getpid(), signal.SIGKILL)
        line(self, done, *rest)

    Progress.line = killed
    import fit_cases

    folder = Path(folder)
    about = dict(fit_cases.UNITS[unit])
    if unit == "users":
        about["users"] = share(np.array(about["users"]))
    # Each has a key of its own: that of the first counts.
    about["key"] = dpx.secret_key()
    if number == "0" and not (folder / "secret").exists():
        about["key"] = jax.random.key(3)
    if unit == "secure":
        about |= fit_cases.secure(*([] if number == "0" else [os.urandom(32)]))
    trained = fit_cases.fit(
        data=share(fit_cases.inputs()[1]),
        workdir=folder,
        checkpoint_every=1,
        l2_clip_norm=float(clip),
        mesh={"model": 2} if jax.local_device_count() == 2 else None,
        **about,
    )
    found = {name: whole(x) for name, x in trained.params.items()}
    losses = [record.loss for record in trained.history]
    np.savez(folder / f"{number}.npz", losses=losses, epsilon=trained.guarantee.epsilon, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
