"""A run of the text app that is killed by SIGKILL while rank 1 writes the checkpoint of a step.

usage: mpiexec -n 2 python text_on_ranks.py STEP FLAG …
"""

from __future__ import annotations

import os
import signal
import sys

from thinwire_text.__main__ import APP
from thinwire_trainer.command import main


def killed(step, argv):
    """Never returns, if the run comes so far."""
    from thinwire_trainer.records import checkpoint

    write = checkpoint.write_tensors

    def torn(path, state):
        write(path, state)
        if path.parent.name == f"{step:08d}" and path.name == "rank1.pt":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.write_tensors = torn
    return main(APP, argv)


if __name__ == "__main__":
    sys.exit(killed(int(sys.argv[1]), sys.argv[2:]))
