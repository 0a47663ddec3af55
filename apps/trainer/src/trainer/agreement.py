"""What ranks agree on outside the training steps: settings, and failures of what each did for itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from communicators import Communicator, allgather

from trainer.errors import AgreedError, RunError
from trainer.options import Settings


def gather_texts(text: str, comm: Communicator) -> list[str]:
    """Every rank's text, in rank order."""
    encoded = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)  # a buffer may not be empty
    return [bytes(received.tolist()).decode()[:-1] for received in allgather(encoded, comm)]


@contextmanager
def together(comm: Communicator) -> Iterator[None]:
    """Run the block on every rank: either it succeeds on all, or all raise the reason of the lowest that failed.

    The block must not communicate. RunError and OSError count as failures; anything else is a fault in the
    program and goes its way. When it returns, every rank has finished its block.
    """
    reason = ""
    try:
        yield
    except (RunError, OSError) as error:
        reason = str(error)
    reasons = gather_texts(reason, comm)
    failed = [rank for rank, text in enumerate(reasons) if text]
    if failed:
        where = "" if len(failed) == comm.size else f" (on rank {', '.join(map(str, failed))} of {comm.size})"
        raise AgreedError(reasons[failed[0]] + where)


def require_same(settings: Settings, comm: Communicator) -> None:
    """Raise AgreedError, naming the first rank and flag that differ from rank 0's, if ranks have other settings."""
    ours = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
    gathered = [text.splitlines() for text in gather_texts("\n".join(ours), comm)]
    for rank, theirs in enumerate(gathered):
        for here, there in zip(gathered[0], theirs, strict=True):
            if here != there:
                raise AgreedError(
                    f"rank 0 was started with {here}, rank {rank} with {there}: start all ranks with the same flags"
                )
