"""Statistics of a running training for Prometheus, OpenTelemetry and TensorBoard, by OpenTelemetry's conventions.

    snapshots = metrics.Snapshots(optimizer.stats)
    with metrics.serving(snapshots, 9464 + local_rank):
        for batch in batches:
            ...
            optimizer.step()
            snapshots.update()

The training's own thread takes snapshots, so that nobody reads tensors while they change; exporters read the last one
in threads of theirs.
"""

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from socket import SHUT_RDWR
from typing import Any, NamedTuple

SHARE = 0.005
"""Largest share of a training's time that snapshots take."""
PORT = 9464
"""Port that OpenTelemetry's exporters for Prometheus take unless told otherwise."""
RANK, PEER = "thinwire.rank", "thinwire.peer"
SUFFIXES = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
"""Ends of names in Prometheus, by unit; annotations such as {step} have none."""


class Metric(NamedTuple):
    """One number of `stats()` as monitoring systems know it.

    Attributes:
        name: Name by OpenTelemetry's conventions, without the unit.
        unit: Unit by UCUM: "s", "By", "1", an annotation such as "{step}", or "" where there is none.
        says: Description in one line.
        grows: Whether it only grows, a counter, and is no gauge.
    """

    name: str
    unit: str
    says: str
    grows: bool = False

    @property
    def prometheus(self) -> str:
        """Name in Prometheus, to which a counter's "_total" is still added."""
        return self.name.replace(".", "_") + SUFFIXES.get(self.unit, "")


METRICS = {
    "steps": Metric("thinwire.step.taken", "{step}", "Steps, skipped ones too.", True),
    "skipped": Metric("thinwire.step.skipped", "{step}", "Steps left out: a gradient was not finite.", True),
    "dense_steps_left": Metric("thinwire.step.dense_left", "{step}", "Steps still to be summed dense."),
    "boundaries": Metric("thinwire.boundary.taken", "{boundary}", "Boundaries of periodic averaging.", True),
    "rounds": Metric("thinwire.round.applied", "{round}", "Rounds of a partial allreduce.", True),
    "gradients": Metric("thinwire.round.gradients", "{gradient}", "Gradients in them, of all ranks.", True),
    "bytes_sent": Metric("thinwire.exchange.sent", "By", "Bytes sent by exchanges.", True),
    "bytes_dense": Metric("thinwire.exchange.dense", "By", "Bytes that dense allreduces would have sent.", True),
    "seconds_exchanging": Metric("thinwire.exchange.duration", "s", "Seconds with an exchange under way.", True),
    "seconds_waited": Metric("thinwire.exchange.waited", "s", "Seconds of exchanges with nothing else to do.", True),
    "seconds_hidden": Metric("thinwire.exchange.hidden", "s", "Seconds of exchanges that overlap has hidden.", True),
    "seconds_selecting": Metric("thinwire.selection.duration", "s", "Seconds of selecting what is sent.", True),
    "density": Metric("thinwire.selection.density", "1", "Share of elements that a rank sends."),
    "residual_norm": Metric("thinwire.residual.norm", "", "2-norm of the residual."),
    "ranks": Metric("thinwire.group.size", "{rank}", "Ranks that train."),
    "part": Metric("thinwire.group.part", "", "Part of each parameter that this rank holds, under HSDP."),
    "generation": Metric("thinwire.group.generation", "", "Number of the group of ranks."),
    "seconds_awaited": Metric("thinwire.peer.awaited", "s", "Seconds in which messages of a peer were lacking.", True),
    "late_seconds": Metric("thinwire.peer.lateness", "s", "Seconds from a round's beginning to a rank's arrival."),
    "verified_step": Metric("thinwire.verify.step", "{step}", "Step of the last comparison of parameters."),
    "verified_hash": Metric("thinwire.verify.hash", "", "48 bits of their hash, alike on ranks that are alike."),
    "seconds": Metric("thinwire.training.duration", "s", "Seconds of training, until this snapshot.", True),
    "taken_at": Metric("thinwire.snapshot.time", "s", "Time of this snapshot, in Unix seconds."),
}
"""Metrics by their key in `stats()`; other keys are not exported."""
CLOCKED = frozenset(key for key, metric in METRICS.items() if metric.grows and metric.unit == "s")
"""Keys of seconds. A difference of two may shrink by rounding, and a counter that shrinks counts as begun anew."""
KEYS = {metric.prometheus + "_total" * metric.grows: key for key, metric in METRICS.items()}
"""Keys in `stats()` by the names of samples in Prometheus."""


class Point(NamedTuple):
    """Value of a metric.

    Attributes:
        metric: Name and unit.
        value: Number, as in `stats()`.
        attributes: Rank, and peer where the number is of one.
    """

    metric: Metric
    value: float
    attributes: dict[str, str]


def points(stats: Mapping[str, float]) -> list[Point]:
    """Lists values, each with its metric and attributes, in the order of the keys.

    Args:
        stats: Numbers as an optimizer's `stats()` gives them.
    """
    own = {RANK: f"{stats['rank']:.0f}"} if "rank" in stats else {}
    found = []
    for key, value in stats.items():
        name, _, peer = key.partition("_of_")
        if name in METRICS:
            found.append(Point(METRICS[name], value, {**own, **({PEER: peer} if peer else {})}))
    return found


class Snapshots:
    """Snapshots of a training's statistics, taken in its own thread and read in any.

    A snapshot costs what `stats()` does, a pass over the residual, so it is taken once in a while: every `every`
    seconds or, where it takes long, seldom enough to take half a per cent of the time. All other calls of `update` look
    at the clock.

    Attributes:
        latest: Last snapshot: the numbers of `stats()`, "seconds" since this object was made, and the Unix time at
            which it was "taken_at". It is replaced, never changed.

    Args:
        stats: Method `stats` of an optimizer or of a hook's state.
        every: Least seconds between two snapshots.
        clock: Seconds of the training, as `time.perf_counter`.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, float]],
        *,
        every: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not every >= 0:
            raise ValueError(f"every is {every!r} s, expected 0 or more between two snapshots")
        self._stats, self._every, self._clock, self._began = stats, every, clock, clock()
        self.latest: Mapping[str, float] = {}
        self.take()

    def update(self) -> bool:
        """Takes a snapshot where one is due; returns whether. The thread that trains calls it after each step."""
        due = self._clock() >= self._due
        if due:
            self.take()
        return due

    def take(self) -> None:
        """Takes a snapshot now, such as after the last step."""
        began = self._clock()
        stats = dict(self._stats())
        for key in CLOCKED & stats.keys():
            stats[key] = max(stats[key], self.latest.get(key, 0.0))
        now = self._clock()
        self.latest = {**stats, "seconds": now - self._began, "taken_at": time.time()}
        self._due = now + max(self._every, (now - began) / SHARE)


@contextmanager
def serving(snapshots: Snapshots, port: int = PORT, *, address: str = "0.0.0.0") -> Iterator[int]:  # noqa: S104 - Prometheus runs elsewhere
    """Serves the last snapshot to Prometheus inside the block, as http://HOST:PORT/metrics.

    Args:
        snapshots: Statistics of this rank.
        port: TCP port, another one for each rank of a machine; 0: a free one.
        address: Address to listen at; "127.0.0.1": for this machine alone.

    Yields:
        The port.

    Raises:
        ImportError: `prometheus_client` is not installed.
        OSError: The port is taken, or is not to be had.
    """
    client = _library("prometheus_client")
    try:
        server, thread = client.start_http_server(port, address, _registry(snapshots))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(
            f"metrics cannot be served on port {port} of {address} ({why}): each rank of a machine, and each job, "
            "takes a port of its own"
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        with suppress(OSError):  # of a system where a socket that listens cannot be shut down
            server.socket.shutdown(SHUT_RDWR)  # also the copies in processes forked meanwhile, as a DataLoader's
        server.server_close()
        thread.join()


def write(snapshots: Snapshots, path: str | PathLike[str]) -> None:
    """Replaces a file by the last snapshot, in the format that Prometheus scrapes, and node_exporter's textfiles have.

    Args:
        snapshots: Statistics of this rank.
        path: File, for node_exporter one that ends in .prom; a reader sees the old one or the new one.

    Raises:
        ImportError: `prometheus_client` is not installed.
        OSError: The file cannot be written.
    """
    _library("prometheus_client").write_to_textfile(str(path), _registry(snapshots))


def observe(snapshots: Snapshots, meter: Any) -> None:
    """Has a meter of OpenTelemetry observe the last snapshot, whenever one of its readers collects.

        provider = MeterProvider(metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())])
        metrics.observe(snapshots, provider.get_meter("thinwire"))

    Args:
        snapshots: Statistics of this rank.
        meter: An `opentelemetry.metrics.Meter`.

    Raises:
        ImportError: The API of OpenTelemetry is not installed.
    """
    observation = _library("opentelemetry.metrics", "opentelemetry-sdk").Observation

    def observed(metric: Metric, _: object) -> list[Any]:
        now = points(snapshots.latest)
        return [observation(point.value, point.attributes) for point in now if point.metric is metric]

    for metric in METRICS.values():
        create = meter.create_observable_counter if metric.grows else meter.create_observable_gauge
        create(metric.name, [partial(observed, metric)], metric.unit, metric.says)


def add_scalars(writer: Any, stats: Mapping[str, float], step: int) -> None:
    """Adds statistics to TensorBoard, as scalars "thinwire/step.taken", "thinwire/peer.awaited/2", ….

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`.
        stats: Numbers as `stats()` gives them, or a snapshot.
        step: Number of the step that they are of.
    """
    for metric, value, attributes in points(stats):
        peer = f"/{attributes[PEER]}" if PEER in attributes else ""
        writer.add_scalar(metric.name.replace(".", "/", 1) + peer, value, step)


def parsed(text: str) -> dict[str, float]:
    """Reads back the numbers of `stats()` from what `serving` serves and `write` writes.

    Args:
        text: Text in Prometheus' format; other metrics in it are left out.

    Raises:
        ImportError: `prometheus_client` is not installed.
        ValueError: The text is of another format.
    """
    parser, found = _library("prometheus_client.parser", "prometheus_client"), dict[str, float]()
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if (key := KEYS.get(sample.name)) is not None:
                peer = sample.labels.get(PEER.replace(".", "_"))
                found[key if peer is None else f"{key}_of_{peer}"] = sample.value
                found["rank"] = float(sample.labels.get(RANK.replace(".", "_"), -1))
    return found


def _registry(snapshots: Snapshots) -> Any:
    registry = _library("prometheus_client").CollectorRegistry()
    registry.register(_Collector(snapshots))
    return registry


class _Collector:
    """Collector of `prometheus_client`, which asks it in the thread of a scrape."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def describe(self) -> Iterable[Any]:
        """Nothing, so that nobody collects before the first scrape."""
        return []

    def collect(self) -> Iterable[Any]:
        """Families of the last snapshot."""
        core, families = _library("prometheus_client.core", "prometheus_client"), dict[Metric, Any]()
        for metric, value, attributes in points(self._snapshots.latest):
            if metric not in families:
                kind = core.CounterMetricFamily if metric.grows else core.GaugeMetricFamily
                labels = [name.replace(".", "_") for name in attributes]
                families[metric] = kind(metric.prometheus, metric.says, labels=labels)
            families[metric].add_metric(list(attributes.values()), value)
        return families.values()


def _library(module: str, package: str = "") -> Any:
    """An optional library, or an ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"metrics need {module} ({error}): pip install {package or module}") from None
