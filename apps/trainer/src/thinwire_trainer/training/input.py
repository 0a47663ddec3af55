"""The samples of each step, read ahead by threads while the model computes.

Threads, not processes: what takes long (decoding, copying) lets go of the interpreter, and a process beside MPI and
CUDA would have to be started anew. Which thread reads a batch changes no bit of it (see `thinwire_trainer.app.Reads`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

from thinwire_trainer.app import Reads, Task


def train_input(task: Task, shard: Sequence[Any], *, seed: int, readers: int) -> Generator[Any, None, None]:
    """What `task.loss` takes for each batch of the shard, in order; to be closed. seed: of this epoch."""
    if not isinstance(task, Reads):
        return (batch for batch in shard)
    return ahead(lambda batch: task.read_train(batch, seed), shard, readers=readers)


def test_input(task: Task, shards: Sequence[Any], *, readers: int) -> Generator[Any, None, None]:
    """What `task.score` takes for each, in order; to be closed."""
    if not isinstance(task, Reads):
        return (batch for batch in shards)
    return ahead(task.read_test, shards, readers=readers)


def ahead(read: Callable[[Any], Any], shard: Sequence[Any], *, readers: int) -> Generator[Any, None, None]:
    """read(batch) for each, in order, begun one more in advance than there are threads; without any when asked for.

    An error in `read` is raised where its batch would have come. Closing waits for what is being read.
    """
    if not readers:
        yield from map(read, shard)
        return
    requests, pending = iter(shard), deque[Future[Any]]()
    with _threads(readers) as submit:
        pending.extend(submit(read, name) for name in islice(requests, readers + 1))
        while pending:
            batch = pending.popleft().result()
            pending.extend(submit(read, name) for name in islice(requests, 1))
            yield batch


@contextmanager
def _threads(count: int) -> Iterator[Callable[..., Future[Any]]]:
    pool = ThreadPoolExecutor(count, thread_name_prefix="reader")
    try:
        yield pool.submit
    finally:
        pool.shutdown(cancel_futures=True)
