"""Ranks in network namespaces, and what befalls them: kill -9, SIGSTOP, a link that goes dark and heals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slow_link import Launcher, SlowLink, missing, namespaces

from bench.elastic_ranks import EVERY, STEP_SECONDS
from bench.record import ROOT

RATE, DELAY = 1000.0, 0.5  # Mbit/s and ms
SETTLE_SECONDS = 10.0  # without faults, once all ranks train
START_SECONDS = 150.0
BEYOND_SECONDS = EVERY * STEP_SECONDS + 2.0  # a stop and a cut last so much longer than the time-out
POLL_SECONDS = 0.2


def link_of(ranks: int) -> Launcher:
    """Link with a place for each rank, from 1 on, and place 0 for where they meet; loopback where it cannot be made."""
    lacking = missing()
    for clause in lacking:
        print(f"no link is cut, for lack of network namespaces: {clause}")
    return Launcher(ranks=ranks + 1) if lacking else SlowLink(ranks=ranks + 1, mbit_per_second=RATE, milliseconds=DELAY)


class Team:
    """Ranks of one library.

    running: rank of each place.
    """

    def __init__(self, way: str, python: str, link: Launcher, folder: Path, options: Any) -> None:
        self.way, self._python, self._link, self._folder, self._options = way, python, link, folder, options
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        folder.mkdir()
        self._log = (folder / "log").open("ab")
        host, port = link.first_address()
        if way == "torchft":
            port += 1  # in the same namespace
            words = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--min_replicas", "2"]
            words += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]  # as its examples have it
            words += ["--heartbeat_timeout_ms", f"{1000 * options.timeout:.0f}"]
        else:
            words = [python, "-m", "communicators.elastic", "--port", str(port)]
        self._server = self._begun(0, words)
        self._meeting = f"{host}:{port}"

    def start(self, place: int) -> None:
        """Starts the rank of a place."""
        asked = {"way": self.way, "meeting": self._meeting, "folder": str(self._folder), "place": place}
        asked |= {"ranks": self._options.ranks, "timeout": self._options.timeout}
        asked["address"] = namespaces.address_of(place) if isinstance(self._link, SlowLink) else "127.0.0.1"
        self.running[place] = self._begun(place, [self._python, "-m", "bench.elastic_ranks", json.dumps(asked)])

    def revive(self) -> None:
        """Starts ranks anew that have ended by themselves."""
        for place, process in list(self.running.items()):
            if process.poll() is not None:
                self.start(place)

    def end(self) -> None:
        """Kills all."""
        for process in (*self.running.values(), self._server):
            process.kill()
            process.wait()
        self._log.close()

    def lines(self) -> list[dict[str, Any]]:
        """Steps that ranks have taken so far, one line each."""
        texts = [file.read_text() for file in self._folder.glob("*.jsonl")]
        return [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]

    def said(self) -> str:
        """End of what its processes have said."""
        return (self._folder / "log").read_text(errors="replace")[-2000:]

    def _begun(self, place: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
        own = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self._link.device}
        words = [*self._link.prefix(place), *words]
        return subprocess.Popen(words, env=own, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)


@contextmanager
def teams_of(link: Launcher, folder: Path, options: Any) -> Iterator[list[Team]]:
    """Teams that train side by side: ours, and torchft's where there is one; killed at the end."""
    teams: list[Team] = []
    try:
        teams.append(Team(options.optimizer, sys.executable, link, folder / "thinwire", options))
        if options.torchft:
            teams.append(Team("torchft", options.torchft, link, folder / "torchft", options))
        for team in teams:
            for place in range(1, options.ranks + 1):
                team.start(place)
        yield teams
    finally:
        for team in teams:
            team.end()


def with_faults(teams: Sequence[Team], link: Launcher, options: Any) -> list[dict[str, Any]]:
    """Makes faults until the time is over, the same ones for all teams at once."""
    _wait_for_all(teams, options.ranks)
    _watch(teams, time.time() + SETTLE_SECONDS)
    chance, faults = random.Random(options.seed), list[dict[str, Any]]()
    kinds = ("kill", "stop", "cut") if isinstance(link, SlowLink) else ("kill", "stop")
    drawn: list[str] = []
    end = time.time() + 60 * options.minutes
    while time.time() + options.every <= end + 1:
        drawn = drawn or chance.sample(kinds, len(kinds))
        kind, place, now = drawn.pop(), chance.randint(1, options.ranks), time.time()
        victims = [team.running[place] for team in teams]
        if kind == "kill":
            for team, victim in zip(teams, victims, strict=True):
                victim.kill()
                victim.wait()
                team.start(place)
        else:
            with _stopped(victims) if kind == "stop" else _cut(link, place):
                _watch(teams, now + options.timeout + BEYOND_SECONDS)
        pids = [victim.pid for victim in victims]
        faults.append({"fault": kind, "at": now, "over": time.time(), "place": place, "pids": pids})
        print(f"{kind} of rank {place} at {now - faults[0]['at']:.0f} s", flush=True)
        _watch(teams, now + options.every)
    return faults


@contextmanager
def _stopped(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    yield
    for process in processes:
        process.send_signal(signal.SIGCONT)


@contextmanager
def _cut(link: Launcher, place: int) -> Iterator[None]:
    """Takes the device of a place down: nothing comes or goes, and no connection is closed; its route goes with it."""
    assert isinstance(link, SlowLink)
    link.darken(place)
    yield
    own, name = [*link.prefix(place), "ip"], namespaces.DEVICE
    namespaces.call(*own, "link", "set", name, "up")
    namespaces.call(
        *own, "route", "change", "10.77.0.0/24", "dev", name, "congctl", namespaces.CONGESTION, *namespaces.WINDOW
    )


def _wait_for_all(teams: Sequence[Team], ranks: int) -> None:
    end = time.time() + START_SECONDS
    for team in teams:
        while len({line["place"] for line in team.lines() if line["size"] == ranks and "boundary" in line}) < ranks:
            if time.time() > end:
                raise TimeoutError(f"not all ranks of {team.way} train after {START_SECONDS:g} s: {team.said()}")
            _watch(teams, time.time() + 1.0)


def _watch(teams: Sequence[Team], until: float) -> None:
    while time.time() < until:
        for team in teams:
            team.revive()
        time.sleep(POLL_SECONDS)
