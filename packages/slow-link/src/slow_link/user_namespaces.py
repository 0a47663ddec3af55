"""Emulated link without root: executes the command again as root of its own namespaces (user_namespaces(7))."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")

# `ip netns` keeps names in /run/netns, which belongs to the machine's root: it is covered by a folder of our own.
PREPARE = """
covered=/run && [ -d /run/netns ] && covered=/run/netns
mount -t tmpfs slowlink $covered && mkdir -p /run/netns && ip link set lo up && exec "$0" "$@"
"""


def enter() -> None:
    """Executes this process's command again in its own namespaces, under the same process id.

    Returns if the process is root, or if namespaces are not allowed. Call it first in a program: everything before it
    runs twice.
    """
    if os.geteuid() != 0 and obstacle() is None:
        sys.stdout.flush()
        os.execvp(UNSHARE[0], [*UNSHARE, *_prepared(sys.executable, *sys.orig_argv[1:])])


def obstacle() -> str | None:
    """Reason why user namespaces do not work here, found by entering once; None where they work."""
    if shutil.which(UNSHARE[0]) is None:
        return "no `unshare` on the PATH (package util-linux)"
    done = subprocess.run([*UNSHARE, *_prepared("true")], capture_output=True, text=True)
    if done.returncode:
        return f"user namespaces are not allowed here ({(done.stderr or done.stdout).strip().splitlines()[-1]})"
    return None


def _prepared(*command: str) -> list[str]:
    return ["sh", "-c", PREPARE, *command]
