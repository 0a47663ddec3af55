"""Places where a running training tells its statistics: endpoints of its ranks, or the folder of a run."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from communicators import metrics

Stats = Mapping[str, float]
SECONDS = 2.0
"""Longest wait for an endpoint."""
MOST_BESIDE = 64
"""Ports on either side of a given one on which ranks of its machine are looked for."""
PORTS = 1 << 16


class NothingHere(Exception):  # noqa: N818 - mostly a wrong address
    """No statistics at a place, with the reason and what to do."""


class Place(ABC):
    """Source of statistics of one job.

    Attributes:
        silent: Names in it that should tell statistics, and did not when it was read last.
    """

    silent: Sequence[str] = ()

    @abstractmethod
    def read(self) -> dict[str, Stats]:
        """Statistics of each rank that tells some now, by a name that stays; NothingHere where none does."""


class Endpoints(Place):
    """Endpoints of ranks, as `metrics.serving` makes them.

    A single one stands for those of the same machine besides, on the ports round it, as the trainer makes them. Other
    ranks may be on other machines: of these ports those count as silent that lie between ones that answer.

    Args:
        given: "HOST:PORT" of each rank, or a URL.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self._urls = [url_of(each) for each in given]
        self._alone = len(given) == 1 and _is_address(given[0]) and given[0] not in self._urls
        self._asked = not self._alone

    def read(self) -> dict[str, Stats]:
        """Statistics by URL."""
        if not self._asked:
            self._urls, self._asked = self._neighbours(self._urls[0]), True
        with ThreadPoolExecutor(max_workers=16) as pool:
            told = {url: pool.submit(_told, url) for url in self._urls}
        found = {url: each.result() for url, each in told.items() if not isinstance(each.exception(), NothingHere)}
        if not found:
            told[self._urls[0]].result()
        places = [number for number, url in enumerate(self._urls) if url in found]
        there = self._urls[places[0] : places[-1] + 1] if self._alone else self._urls
        self.silent = [url for url in there if url not in found]
        return found

    def _neighbours(self, url: str) -> list[str]:
        """URLs that ranks of its machine may have, once it has told how many ranks there are."""
        told = _told(url)
        host, port = url.removesuffix("/metrics").rsplit(":", 1)
        rank, ranks = int(told.get("rank", 0)), int(told.get("ranks", 1))
        beside = range(-min(rank, MOST_BESIDE), min(ranks - rank - 1, MOST_BESIDE) + 1)
        return [f"{host}:{int(port) + step}/metrics" for step in beside if 0 < int(port) + step < PORTS]


def url_of(given: str) -> str:
    """URL of an endpoint that is given as HOST:PORT, or as a URL."""
    return given if given.startswith(("http://", "https://")) else f"http://{given}/metrics"


def _told(url: str) -> Stats:
    try:
        with urlopen(url, timeout=SECONDS) as answer:  # noqa: S310 - http or https, by url_of
            return _numbers(answer.read().decode(), url)
    except (OSError, ValueError, HTTPException) as error:
        why = error.reason if isinstance(error, URLError) else error
        raise NothingHere(
            f"nothing answers at {url} ({why}): start the training with --metrics prometheus, or with "
            "metrics.serving(), and give the HOST:PORT of its ranks"
        ) from error


def _numbers(text: str, where: object) -> Stats:
    with suppress(ValueError):
        if numbers := metrics.parsed(text):
            return numbers
    raise NothingHere(f"{where} holds no metrics of thinwire: another program's endpoint, or file?")


class RunFolder(Place):
    """Folder of a run of the trainer: the files of its processes, else its epochs.

    Args:
        path: As given with --output.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._was_live = path, False

    def read(self) -> dict[str, Stats]:
        """Statistics by process or, where --metrics file was not given, those of rank 0 at its last two epochs."""
        if not (self._path / "config.json").exists():
            raise NothingHere(f"{self._path} holds no run: give the --output of one, or HOST:PORT of its metrics")
        live = dict(self._live())
        self._was_live = self._was_live or bool(live)
        if not live and (self._path / "model.pt").exists():
            raise NothingHere(f"the run in {self._path} has ended: its epochs are in metrics.jsonl")
        return live if self._was_live else self._epochs()

    def _live(self) -> Iterator[tuple[str, Stats]]:
        for file in sorted((self._path / "live").glob("*.prom")):
            with suppress(FileNotFoundError):  # its process has ended meanwhile
                yield file.stem, _numbers(file.read_text(), file)

    def _epochs(self) -> dict[str, Stats]:
        path = self._path / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        if not rows:
            raise NothingHere(f"{self._path} has no epoch yet: train with --metrics file to see steps")
        return {"by epochs": _summed(rows)}


def _summed(rows: list[str]) -> Stats:
    """Statistics as of the last epoch, by the names of `stats()`, from rows of metrics.jsonl."""
    epochs = [json.loads(row) for row in rows]

    def total(name: str) -> float:
        return math.fsum(epoch.get(name) or 0.0 for epoch in epochs)

    return {
        "rank": 0,
        "ranks": epochs[-1]["world_size"],
        "epoch": epochs[-1]["epoch"],
        "steps": epochs[-1]["steps"],
        "seconds": total("seconds") - total("evaluation_seconds"),
        "seconds_selecting": total("selection_seconds"),
        "seconds_waited": total("exchange_seconds"),
        "bytes_sent": total("bytes_sent"),
    }


def place_of(given: Sequence[str]) -> Place:
    """Place that the command line names: a folder, or endpoints."""
    if len(given) == 1 and (Path(given[0]).exists() or not _is_address(given[0])):
        return RunFolder(Path(given[0]))
    if wrong := [each for each in given if not _is_address(each)]:
        raise NothingHere(f"{wrong[0]!r} given, expected HOST:PORT of each rank, or one run's folder")
    return Endpoints(given)


def _is_address(given: str) -> bool:
    host, _, port = given.rpartition(":")
    return given.startswith(("http://", "https://")) or bool(host and port.isdecimal() and 0 < int(port) < PORTS)
