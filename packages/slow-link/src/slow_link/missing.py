"""Requirements of an emulated link that this machine lacks."""

from __future__ import annotations

import os
import shutil
import sys

from slow_link import namespaces, tun, user_namespaces

NOT_ENTERED = "network namespaces need root, or `slow_link.user_namespaces.enter()` first in the program"


class Unavailable(RuntimeError):  # noqa: N818 - a fact about the machine
    """Error where no emulated link can be made; it names everything that is missing."""


def missing() -> list[str]:
    """Lists the missing requirements, one clause each; empty where a link can be made.

    Each requirement is checked by trying it once.
    """
    if sys.platform != "linux":
        return [f"network namespaces need Linux, this is {sys.platform}"]
    tools = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    lacking = [f"no `{tool}` on the PATH (packages iproute2, procps)" for tool in tools]
    if os.geteuid() != 0:
        reason = user_namespaces.obstacle()
        lacking.append(f"network namespaces need root, and {reason}" if reason else NOT_ENTERED)
    if lacking:
        return lacking
    return _trial()


def _trial() -> list[str]:
    """Makes a complete namespace, removes it, and lists the failures."""
    try:
        device, name = tun.open_tun()
    except OSError as error:
        return [f"no TUN device can be made by {tun.PATH}: {error.strerror}"]
    try:
        namespaces.create(namespaces.name_of(0, 0), name, rank=0, bits_per_second=1e6)
    except RuntimeError as error:
        return [str(error)]
    finally:
        os.close(device)
        for left in namespaces.ours(0):
            namespaces.remove(left)
    return []
