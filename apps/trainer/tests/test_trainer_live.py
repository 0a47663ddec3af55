"""--metrics: statistics of a run under way, which change nothing in it; and --tensorboard, which has them too."""

import contextlib
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.request import urlopen

import pytest
from communicators import Communicator, SimulatedWorld, as_communicator, metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from resumed_runs import assert_same_bits, result
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.records.live import of_local_rank
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run

Given = Callable[..., Options]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def looking(app: App, look: Callable[[], object]) -> App:
    """The app, which looks at something before each of its losses."""

    def build(options: Options, device: Any) -> Any:
        task = app.build(options, device)
        own = task.loss

        def loss(batch: Any, generator: Any) -> Any:
            look()
            return own(batch, generator)

        task.loss = loss  # type: ignore[method-assign]
        return task

    return replace(app, build=build)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots after every step, however long they take."""
    monkeypatch.setattr(metrics, "SHARE", float("inf"))
    monkeypatch.setattr(metrics, "Snapshots", partial(metrics.Snapshots, every=0.0))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--metrics grafana", "given 'grafana', expected prometheus, prometheus:PORT, otlp, otlp:URL or file"),
        ("--metrics prometheus:0", "given 'prometheus:0'"),
        ("--metrics prometheus:99999", "given 'prometheus:99999'"),
        ("--metrics prometheus:", "given 'prometheus:'"),
        ("--metrics otlp:collector", "given 'otlp:collector'"),
        ("--metrics file:here", "given 'file:here'"),
    ],
)
def test_a_wrong_place_is_named_with_what_was_expected(app: App, flags: str, says: str) -> None:
    with pytest.raises(RunError) as refusal:
        parse(flags.split(), app, world_size=4)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "packages"),
    [
        ("prometheus", "prometheus_client"),
        ("file", "prometheus_client"),
        ("otlp:http://x:4318", "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_a_library_that_is_missing_is_named_before_ranks_start(
    app: App, monkeypatch: pytest.MonkeyPatch, kind: str, packages: str
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    for find in (lambda name: None, absent):
        monkeypatch.setattr("thinwire_trainer.command_line.flags.find_spec", find)
        with pytest.raises(RunError, match=f"pip install {packages} "):
            parse(["--metrics", kind], app, world_size=None)


def test_each_rank_of_a_machine_has_a_port_of_its_own() -> None:
    assert [of_local_rank("prometheus", rank) for rank in (0, 2)] == ["prometheus:9464", "prometheus:9466"]
    assert of_local_rank("prometheus:7000", 3) == "prometheus:7003"
    assert [of_local_rank(where, 3) for where in (None, "file", "otlp:http://x:1")] == [None, "file", "otlp:http://x:1"]


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("algorithm", ["gtopk", "diloco", "eager-majority"])
def test_prometheus_scrapes_every_rank_of_a_run_and_changes_nothing(app: App, options: Given, algorithm: str) -> None:
    plain = options(algorithm=algorithm, output=options().output / "plain")
    SimulatedWorld(2).run(lambda comm: run(app, plain, comm))
    given, ports = options(algorithm=algorithm, metrics="prometheus"), (free_port(), free_port())
    scraped: list[list[dict[str, float]]] = [[], []]

    def rank(comm: Communicator) -> None:
        port = ports[comm.rank]

        def scrape() -> None:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                scraped[comm.rank].append(metrics.parsed(page.read().decode()))

        run(looking(app, scrape), replace(given, metrics=f"prometheus:{port}"), comm)

    SimulatedWorld(2).run(rank)
    assert_same_bits(result(given), result(plain))
    for place, found in enumerate(scraped):
        assert [stats["steps"] for stats in found] == list(range(len(found)))
        assert {(stats["rank"], stats["ranks"]) for stats in found} == {(place, 2)}
        sent = [stats["bytes_sent"] for stats in found]
        assert sent == sorted(sent)
        assert sent[-1] > 0


def test_a_port_that_is_taken_is_one_line_on_all_ranks(app: App, options: Given) -> None:
    given, said = options(metrics="prometheus"), [""] * 2
    with socket.create_server(("0.0.0.0", 0)) as server:
        ports = (server.getsockname()[1], free_port())

        def rank(comm: Communicator) -> None:
            with pytest.raises(AgreedError) as refusal:
                run(app, replace(given, metrics=f"prometheus:{ports[comm.rank]}"), comm)
            said[comm.rank] = str(refusal.value)

        SimulatedWorld(2).run(rank)
    assert said[0] == said[1]
    assert f"port {ports[0]} of 0.0.0.0 (Address already in use)" in said[0]
    assert said[0].endswith("(on rank 0 of 2)")
    assert "\n" not in said[0]


@pytest.mark.usefixtures("every_step")
def test_files_tell_of_processes_under_way_and_of_no_others(app: App, options: Given) -> None:
    given, found = options(metrics="file"), []
    live = given.output / "live"
    live.mkdir(parents=True)
    (live / "node-1.prom").write_text("left by a process that was killed\n")

    def look() -> None:
        (file,) = live.glob("*")
        assert file.name.endswith(f"-{os.getpid()}.prom")
        found.append(metrics.parsed(file.read_text())["steps"])

    run(looking(app, look), given, as_communicator(None))
    assert found == list(range(len(found))) != []
    assert list(live.glob("*")) == []


@pytest.mark.usefixtures("every_step")
def test_a_run_goes_on_where_its_file_cannot_be_written_any_more_and_says_so(
    app: App, options: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, own = [], metrics.write

    def write(snapshots: Any, path: Any) -> None:
        writes.append(path)
        if len(writes) > 2:
            raise OSError(28, "No space left on device")
        own(snapshots, path)

    monkeypatch.setattr(metrics, "write", write)
    given, said = options(metrics="file"), io.StringIO()
    with contextlib.redirect_stdout(said):
        run(app, given, as_communicator(None))
    assert len(writes) == 3
    assert said.getvalue().count("cannot be written any more, and training goes on (No space left on device)") == 1
    assert len(read_metrics(given.output / "metrics.jsonl")) == 2


class Collector(BaseHTTPRequestHandler):
    """What an OpenTelemetry collector gets."""

    got: list[ExportMetricsServiceRequest] = []  # noqa: RUF012 - of the one that runs

    def do_POST(self) -> None:
        assert self.path == "/v1/metrics"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers.get("Content-Encoding") is None
        self.got.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.got = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_collector_gets_the_last_numbers_of_a_run(app: App, options: Given, collector: str) -> None:
    given = options(algorithm="gtopk", metrics=f"otlp:{collector}")
    run(app, given, as_communicator(None))
    told = {
        metric.name: metric
        for request in Collector.got
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    steps = told["thinwire.step.taken"]
    assert (steps.unit, steps.sum.is_monotonic) == ("{step}", True)
    assert steps.sum.data_points[0].as_int == read_metrics(given.output / "metrics.jsonl")[-1]["steps"]
    assert told["thinwire.selection.density"].gauge.data_points[0].as_double == 0.2


def test_a_collector_that_is_not_there_costs_a_run_seconds_at_its_end(app: App, options: Given) -> None:
    began = time.monotonic()
    given = options(metrics=f"otlp:http://127.0.0.1:{free_port()}")
    run(app, given, as_communicator(None))
    assert time.monotonic() - began < 30
    assert (given.output / "model.pt").exists()


def test_tensorboard_has_the_same_numbers(app: App, options: Given) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    given = options(algorithm="gtopk", tensorboard=True)
    run(app, given, as_communicator(None))
    events = loading.EventAccumulator(str(given.output / "events"))
    events.Reload()
    rows = read_metrics(given.output / "metrics.jsonl")
    taken = [(event.step, event.value) for event in events.Scalars("thinwire/step.taken")]
    assert taken == [(row["steps"], row["steps"]) for row in rows]
    assert [event.value for event in events.Scalars("train_loss")] == pytest.approx([row["train_loss"] for row in rows])
    assert events.Scalars("thinwire/selection.density")[-1].value == pytest.approx(0.2)


def test_tensorboard_has_every_epoch_once_of_a_run_that_was_gone_on_with(app: App, options: Given) -> None:
    """Also the one that the checkpoint is of."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    given = options(tensorboard=True, max_epochs=3, lr_schedule="constant")
    for again in (given, replace(given, resume="previous", max_epochs=4)):
        run(app, again, as_communicator(None))
    shown = loading.EventAccumulator(str(given.output / "events")).Reload().Scalars("train_loss")
    assert [event.step for event in shown] == [row["steps"] for row in read_metrics(given.output / "metrics.jsonl")]
