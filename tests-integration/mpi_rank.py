"""What mpiexec starts for a rank: asks forked_ranks.py for the rank, which speaks to mpiexec, and ends as it does.

Where that is not MPICH's, whose ranks have a descriptor for it, it becomes the rank itself.

usage: python -IS mpi_rank.py SOCKET WORDS (what stands behind `python`)
"""

import json
import os
import socket
import sys

path, *words = sys.argv[1:]
if "PMI_FD" not in os.environ:
    os.execv(sys.executable, [sys.executable, *words])
rank = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(path)
    socket.send_fds(asking, [b"{"], [sys.stdout.fileno(), sys.stderr.fileno(), int(os.environ["PMI_FD"])])
    asking.sendall(json.dumps({"ranks": [rank], "timeout": 1e9}).encode()[1:] + b"\n")
    [status] = json.loads(asking.makefile().read())
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
