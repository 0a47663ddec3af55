"""What ranks agree on outside the training steps: settings, and failures of what each did for itself."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from communicators import Communicator, allgather

from thinwire_trainer.errors import AgreedError, RunError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GO_ON, START_AGAIN = "go on with --resume", "start again"  # once there is room


def gather_texts(text: str, comm: Communicator) -> list[str]:
    """Every rank's text, in rank order."""
    content = text.encode(errors="backslashreplace") + b"\n"  # a buffer may not be empty
    encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return [bytes(received.tolist()).decode()[:-1] for received in allgather(encoded, comm)]


@contextmanager
def all_or_none(comm: Communicator, *, advice: str = GO_ON) -> Iterator[None]:
    """Run the block on every rank: either it succeeds on all, or all raise the reason of the lowest that failed.

    The block must not communicate. RunError and OSError count as failures; anything else is a fault in the
    program and goes its way. When it returns, every rank has finished its block. advice: see `describe`.
    """
    reason = ""
    try:
        yield
    except (RunError, OSError) as error:
        reason = describe(error, advice=advice) if isinstance(error, OSError) else str(error)
    reasons = gather_texts(reason, comm)
    failed = [rank for rank, text in enumerate(reasons) if text]
    if failed:
        where = "" if len(failed) == comm.size else f" (on rank {', '.join(map(str, failed))} of {comm.size})"
        raise AgreedError(reasons[failed[0]] + where)


def describe(error: OSError, *, advice: str = GO_ON) -> str:
    """What the system says about which file; on a full disk also what to do, once there is room."""
    what = str(error.strerror or error or type(error).__name__)
    named = f"{error.filename}: {what}" if error.filename is not None else what
    return f"{named}: make room, then {advice}" if error.errno in NO_SPACE else named


def require_same(flags: Mapping[str, object], comm: Communicator) -> None:
    """Raise AgreedError, naming the first rank and flag that differ from rank 0's, if ranks have other flags."""
    ours = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
    gathered = [text.splitlines() for text in gather_texts("\n".join(ours), comm)]
    for rank, theirs in enumerate(gathered):
        for here, there in zip(gathered[0], theirs, strict=True):
            if here != there:
                raise AgreedError(
                    f"rank 0 was started with {here}, rank {rank} with {there}: start all ranks with the same flags"
                )
