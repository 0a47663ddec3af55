"""--metrics: statistics of a run under way, for Prometheus, a collector of OpenTelemetry, or files that others read."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from communicators import metrics

from thinwire_trainer.records.metrics import TrainingProgress
from thinwire_trainer.records.run_folder import RunFolder

Stats = Callable[[], Mapping[str, float]]
Update = Callable[[], object]
"""To be called after each step."""


def of_local_rank(where: str | None, local_rank: int) -> str | None:
    """--metrics of one of a machine's ranks: each has the port after the last one's."""
    kind, _, port = (where or "").partition(":")
    return where if kind != "prometheus" else f"{kind}:{int(port or metrics.PORT) + local_rank}"


@contextmanager
def published(where: str | None, stats: Stats, folder: RunFolder, progress: TrainingProgress) -> Iterator[Update]:
    """Publish statistics inside the block. OSError where a port is taken."""
    kind, _, place = (where or "").partition(":")
    if not where:
        yield lambda: None
        return
    snapshots = metrics.Snapshots(stats)
    publish: dict[str, Callable[..., AbstractContextManager[Update]]]
    publish = {"prometheus": _served, "otlp": _collected, "file": _written}
    with publish[kind](snapshots, place, folder, progress) as update:
        yield update
        snapshots.take()  # the last steps, for what exports them at the end


@contextmanager
def _served(snapshots: metrics.Snapshots, port: str, _: object, progress: TrainingProgress) -> Iterator[Update]:
    with metrics.serving(snapshots, int(port)) as served:
        progress.note(f"metrics at http://{socket.gethostname()}:{served}/metrics")
        yield snapshots.update


@contextmanager
def _collected(snapshots: metrics.Snapshots, url: str, *_: Any) -> Iterator[Update]:
    """All else is set by OpenTelemetry's variables, such as OTEL_SERVICE_NAME and OTEL_METRIC_EXPORT_INTERVAL."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(f"{url.rstrip('/')}/v1/metrics" if url else None)
    provider = MeterProvider([PeriodicExportingMetricReader(exporter)], shutdown_on_exit=False)
    metrics.observe(snapshots, provider.get_meter("thinwire"))
    try:
        yield snapshots.update
    finally:
        provider.shutdown(timeout_millis=5_000)


@contextmanager
def _written(snapshots: metrics.Snapshots, _: str, folder: RunFolder, progress: TrainingProgress) -> Iterator[Update]:
    """Each process has a file of its own, because ranks may change, and deletes it at its end."""
    path = folder.live / f"{socket.gethostname()}-{os.getpid()}.prom"
    path.parent.mkdir(exist_ok=True)
    metrics.write(snapshots, path)
    stopped = False

    def update() -> None:
        nonlocal stopped
        if stopped or not snapshots.update():
            return
        try:
            metrics.write(snapshots, path)
        except OSError as error:
            stopped = True
            progress.say(f"--metrics file: {path} cannot be written any more, and training goes on ({error.strerror})")

    try:
        yield update
    finally:
        path.unlink(missing_ok=True)


def clear(live: Path) -> None:
    """Delete what processes that were killed have left."""
    for file in live.glob("*.prom"):
        file.unlink(missing_ok=True)
