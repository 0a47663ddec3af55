"""Processes side by side under one hard time limit; none of them is left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

POLL_SECONDS = 0.02
FAILURE_SECONDS = 10.0
"""Time that the others get after one has failed: long enough to say why they fail too."""

TERMINATION_SECONDS = 2.0


@dataclass
class Running:
    """Process in a session of its own. out, err: files that collect its output, None where it is not captured."""

    process: subprocess.Popen[bytes]
    out: IO[bytes] | None
    err: IO[bytes] | None

    def completed(self) -> subprocess.CompletedProcess[str]:
        """Exit status and output of the process, once it has ended."""
        texts = [None if file is None else _text(file) for file in (self.out, self.err)]
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, *texts)


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout: float,
    capture: bool,
    watch: Callable[[], None],
    ending: Callable[[Sequence[subprocess.Popen[bytes]]], None],
) -> list[subprocess.CompletedProcess[str]]:
    """Runs commands side by side, each with additions to the environment; returns their results in order.

    timeout: seconds, then `subprocess.TimeoutExpired`. watch: called all the while; an error that it raises ends the
    processes. ending: called with the processes at last; leaves none.
    """
    running: list[Running] = []
    with ExitStack() as files:
        try:
            for command, environment in zip(commands, environments, strict=True):
                out, err = [files.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)]
                running.append(Running(_launch(command, environment, out, err), out, err))
            in_time = _wait(running, timeout, watch)
        finally:
            ending([one.process for one in running])
        done = [one.completed() for one in running]
    if not in_time:
        outputs = [
            "".join(filter(None, texts)) for texts in zip(*((one.stdout, one.stderr) for one in done), strict=True)
        ]
        raise subprocess.TimeoutExpired(list(commands[0]), timeout, *outputs)
    return done


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Sends SIGTERM to the sessions that still run, so that a launcher ends its ranks, and SIGKILL soon after."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    last = time.monotonic() + TERMINATION_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, last - time.monotonic()))
        _signal(process, signal.SIGKILL)
        process.wait()


def _launch(
    command: Sequence[str], environment: Mapping[str, str], out: IO[bytes] | None, err: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def _wait(running: Sequence[Running], timeout: float, watch: Callable[[], None]) -> bool:
    """Waits until all have ended, or one has failed and the others had their time; False if time ran out first."""
    last, failed = time.monotonic() + timeout, False
    while None in (codes := [one.process.poll() for one in running]):
        watch()
        if any(codes) and not failed:
            failed = True
            last = min(last, time.monotonic() + FAILURE_SECONDS)
        if time.monotonic() > last:
            return failed
        time.sleep(POLL_SECONDS)
    return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals a process's whole session while it runs; afterwards its number may belong to another process."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
