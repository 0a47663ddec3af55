"""Scratch memory for the kernels, kept by each thread."""

import threading

import numpy as np

KEPT = 1 << 26  # bytes that a thread keeps: the first touch of fresh memory costs more than its use


class Scratch(threading.local):
    """One thread's."""

    memory, address = np.empty(0, np.uint8), 0

    def of(self, nbytes: int) -> int:
        """The address of so many bytes, until this thread asks again."""
        if nbytes > len(self.memory):
            self.memory = np.empty(nbytes, np.uint8)
            self.address = self.memory.ctypes.data
        return self.address

    def trim(self) -> None:
        """Gives back what is more than is kept."""
        if len(self.memory) > KEPT:
            self.memory, self.address = np.empty(0, np.uint8), 0


SCRATCH = Scratch()
