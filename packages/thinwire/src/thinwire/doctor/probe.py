"""Findings, and processes that look: what they try may hang or abort."""

import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from tempfile import TemporaryFile
from typing import Any, NamedTuple

OK, NOTE, FAULT = "ok", "note", "fault"


class Finding(NamedTuple):
    """Fact about this installation. level: OK, NOTE or FAULT. remedy: "" where there is nothing to do."""

    level: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        level = self.level.upper() if self.level == FAULT else self.level
        return f"{level:5} {self.what}" + (f": {self.remedy}" if self.remedy else "")


class Probe(NamedTuple):
    """Outcome of a process. status: None where it did not end within `seconds`."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def why(self) -> str:
        """Reason for which it has failed, in one line."""
        if self.status is None:
            return f"not done within {self.seconds:g} s"
        lines = [line.strip() for line in self.err.splitlines() if any(map(str.isalpha, line))]
        return lines[-1] if lines else f"exit status {self.status}, without a word"


ok, note, fault = (partial(Finding, level) for level in (OK, NOTE, FAULT))


def probe(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> Probe:
    """Runs what may hang or abort. Files hold its output, since a pipe may be kept open by what it has started."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "env": dict(environ)}
        try:  # close_fds=False: a rank inherits the descriptor by which it speaks to mpiexec
            status = subprocess.run(command, timeout=seconds, close_fds=False, **how).returncode
        except subprocess.TimeoutExpired:
            status = None
        out.seek(0)
        err.seek(0)
        return Probe(status, out.read(), err.read(), seconds)
