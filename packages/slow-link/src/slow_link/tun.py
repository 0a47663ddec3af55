"""TUN devices: network devices whose packets a process carries."""

from __future__ import annotations

import fcntl
import os
import struct

PATH = "/dev/net/tun"

_SET_DEVICE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD of linux/if_tun.h
_IP, _NO_INFO, _VNET_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUM, _SEGMENTATION = 1, 2
_NAME = "slowlink%d"  # the kernel puts in the next free number


def open_tun() -> tuple[int, str]:
    """Opens a new device in this namespace: its file descriptor and name; it is gone once the last descriptor closes.

    Checksums and segmentation are skipped: a packet goes from one kernel to the same kernel, and a segment of 9,000
    bytes costs the switch as much as one of 1,500.
    """
    device = os.open(PATH, os.O_RDWR | os.O_NONBLOCK)
    try:
        request = struct.pack("16sH22x", _NAME.encode(), _IP | _NO_INFO | _VNET_HEADER)
        name = fcntl.ioctl(device, _SET_DEVICE, request)[:16].rstrip(b"\0").decode()
        fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUM | _SEGMENTATION)
    except OSError:
        os.close(device)
        raise
    return device, name
