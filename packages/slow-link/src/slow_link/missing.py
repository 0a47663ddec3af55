"""Requirements of an emulated link: those that this machine lacks, and user namespaces in the place of root."""

import os
import shutil
import subprocess
import sys

from slow_link import namespaces

NOT_ENTERED = "network namespaces need root, or `slow_link.enter_user_namespaces()` first in the program"
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")

# `ip netns` keeps names in /run/netns, which belongs to the machine's root: it is covered by a folder of our own.
PREPARE = """
covered=/run && [ -d /run/netns ] && covered=/run/netns
mount -t tmpfs slowlink $covered && mkdir -p /run/netns &&
PATH=$PATH:/usr/sbin:/sbin ip link set lo up && exec "$0" "$@"
"""


class Unavailable(RuntimeError):  # noqa: N818 - a fact about the machine
    """Error where no emulated link can be made; it names everything that is missing."""


def missing() -> list[str]:
    """Lists the missing requirements, one clause each; empty where a link can be made.

    Each requirement is checked by trying it once.
    """
    if sys.platform != "linux":
        return [f"network namespaces need Linux, this is {sys.platform}"]
    tools = [name for name in ("ip", "tc", "sysctl") if namespaces.tool(name) is None]
    lacking = [f"no `{name}` on the PATH (packages iproute2, procps)" for name in tools]
    if os.geteuid() != 0:
        reason = obstacle()
        lacking.append(f"network namespaces need root, and {reason}" if reason else NOT_ENTERED)
    if lacking:
        return lacking
    return _trial()


def _trial() -> list[str]:
    """Makes a complete namespace, removes it, and lists the failures."""
    try:
        device, name = namespaces.open_tun()
    except OSError as error:
        return [f"no TUN device can be made by {namespaces.TUN}: {error.strerror}"]
    try:
        namespaces.create(namespaces.name_of(0, 0), name, rank=0, bits_per_second=1e6)
    except RuntimeError as error:
        return [str(error)]
    finally:
        os.close(device)
        for left in namespaces.ours(0):
            namespaces.remove(left)
    return []


def enter_user_namespaces() -> None:
    """Executes this process's command again in its own namespaces, under the same process id.

    Returns if the process is root, or if namespaces are not allowed. Call it first in a program: everything before it
    runs twice.
    """
    if os.geteuid() != 0 and obstacle() is None:
        sys.stdout.flush()
        os.execvp(UNSHARE[0], [*UNSHARE, *_prepared(sys.executable, *sys.orig_argv[1:])])  # noqa: S606 - this very program, in a namespace


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
