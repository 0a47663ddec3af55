"""Labels of blocks for torch.profiler, at next to no cost while nobody records."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOBODY: AbstractContextManager[object] = nullcontext()


def labelled(name: str) -> AbstractContextManager[object]:
    """Labels a block where torch.profiler records; else nothing happens, which takes a fifth of a µs.

    Labels of a thread nest: a block that begins inside another one ends there, too.
    torch has no public way to ask whether anybody records: where the private one is missing, all blocks are labelled,
    which takes 6 µs each.
    """
    return profiler.record_function(name) if records() else _NOBODY


def records() -> bool:
    """Whether torch.profiler records."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))
