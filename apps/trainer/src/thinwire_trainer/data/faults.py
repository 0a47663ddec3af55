"""Data that cannot be used: an error that names the file and the fault, or, with --skip-bad, left out and told."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from thinwire_trainer.errors import RunError

SHOWN = 3  # of the first ones why


@dataclass
class Faults:
    """skip: leave out what has a fault. found: why, for each that was left out, with its file."""

    skip: bool
    found: list[str] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[None]:
        """The block reads what belongs to one sample: a file, an utterance, a line. RunError, unless it is left out."""
        try:
            yield
        except (RunError, OSError) as error:
            reason = _reason(error)
            if not self.skip:
                raise RunError(f"{reason} (--skip-bad leaves such data out, and counts them)") from None
            self.found.append(reason)

    def told(self) -> str:
        """How many were left out, and of the first ones why; "" where none was."""
        if not self.found:
            return ""
        more = [f"and {len(self.found) - SHOWN:,} more"] if len(self.found) > SHOWN else []
        return f"--skip-bad left out {len(self.found):,}: {'; '.join([*self.found[:SHOWN], *more])}"

    def counted(self) -> dict[str, float]:
        """For the metrics, where data may be left out: `skipped`."""
        return {"skipped": float(len(self.found))} if self.skip else {}


def _reason(error: RunError | OSError) -> str:
    if isinstance(error, RunError):
        return str(error)
    return f"{error.filename} cannot be read: {error.strerror or error}"
