"""Functions of ours that a process enters, counted by Python's own profiler. Imports nothing heavy."""

import atexit
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

FOUND = "THINWIRE_WALK"
"""Environment variable: the folder where each process of a command leaves what it entered."""
STEPS = ("torch/optim/sgd.py", "torch/optim/adamw.py")


class Entered:
    """Counts, by package, file and name, how often functions of ours are entered on any thread that begins later.

    Bodies of modules and classes, comprehensions and lambdas do not count. under: "packages" or "apps".
    """

    def __init__(self, under: str) -> None:
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self._under, self._counts = f"/{under}/", False
        threading.setprofile(self)
        sys.setprofile(self)

    @contextmanager
    def counting(self) -> Iterator[Counter[tuple[str, str, str]]]:
        """Counts anew, inside the block only."""
        self.calls, self._counts = Counter(), True
        try:
            yield self.calls
        finally:
            self._counts = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and self._counts and not code.co_name.startswith("<"):
            _, ours, place = code.co_filename.rpartition(self._under)
            file = place.partition("/src/")[2]
            if ours and file and "__qualname__" not in code.co_names:
                self.calls[file.partition("/")[0], file, code.co_qualname] += 1


def until_the_first_step() -> None:
    """Counts this process's functions of apps/ until SGD's or AdamW's own `step`; leaves them in `FOUND`."""
    entered, rank = Entered("apps"), os.environ.get("PMI_RANK", "0")
    counting = entered.counting()
    calls = counting.__enter__()

    def leave() -> None:
        if sys.getprofile() is not None:
            sys.setprofile(None)
            counting.__exit__(None, None, None)
            found = [[*key, count] for key, count in calls.items()]
            Path(os.environ[FOUND], f"{rank}-{os.getpid()}.json").write_text(json.dumps(found))

    def until(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "step" and frame.f_code.co_filename.endswith(STEPS):
            leave()
        else:
            entered(frame, event, argument)

    sys.setprofile(until)
    atexit.register(leave)
