"""Exporters of stats(): what each of them tells is what the training said; who asks, how often, and what it costs."""

import importlib
import json
import multiprocessing
import re
import socket
import threading
from itertools import pairwise
from urllib.request import urlopen

import pytest
from communicators import metrics
from communicators.metrics import CLOCKED, METRICS, PEER, RANK, SHARE, Snapshots
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.json.file.metric_exporter import FileMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader

pytestmark = pytest.mark.quick

OF_A_PEER = ("seconds_awaited", "late_seconds")
PLAIN = [key for key in METRICS if key not in (*OF_A_PEER, "seconds", "taken_at")]
COUNTS = st.one_of(st.integers(0, 2**53), st.floats(0, 1e300))


@st.composite
def statistics(draw):
    stats = draw(st.fixed_dictionaries({"rank": st.integers(0, 4096)}, optional=dict.fromkeys(PLAIN, COUNTS)))
    for name in OF_A_PEER:
        peers = draw(st.dictionaries(st.integers(0, 4096), COUNTS, max_size=3))
        stats |= {f"{name}_of_{peer}": seconds for peer, seconds in peers.items()}
    return stats


@pytest.fixture(scope="module")
def served():
    """One endpoint, of whatever statistics are put in the dict, and its URL."""
    stats = {}
    snapshots = Snapshots(lambda: stats)
    with metrics.serving(snapshots, 0, address="127.0.0.1") as port:
        yield stats, snapshots, f"http://127.0.0.1:{port}/metrics"


def page_of(url):
    with urlopen(url) as page:
        return page.read().decode()


def collected(snapshots):
    """Values by key of stats(), as an application's own reader of OpenTelemetry has them."""
    reader, keys = InMemoryMetricReader(), {metric.name: key for key, metric in METRICS.items()}
    metrics.observe(snapshots, MeterProvider([reader], shutdown_on_exit=False).get_meter("test"))
    found = {}
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        key = keys[metric.name]
        assert (metric.unit, metric.description) == METRICS[key][1:3]
        assert getattr(metric.data, "is_monotonic", False) == METRICS[key].grows
        for point in metric.data.data_points:
            peer = f"_of_{point.attributes[PEER]}" if PEER in point.attributes else ""
            found[key + peer] = point.value
            found["rank"] = float(point.attributes[RANK])
    return found


class Writer:
    """TensorBoard's, as far as scalars go."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, step):
        self.scalars[name] = value, step


@given(stats=statistics())
def test_every_exporter_tells_what_stats_said(tmp_path_factory, served, stats):
    own, snapshots, url = served
    before = snapshots.latest
    own.clear()
    own.update(stats)
    snapshots.take()
    latest = snapshots.latest
    for name, value in stats.items():  # seconds never shrink: a counter that does has begun anew
        assert latest[name] == (max(value, before.get(name, 0.0)) if name in CLOCKED else value)
    assert metrics.parsed(page_of(url)) == latest
    assert collected(snapshots) == latest
    path = tmp_path_factory.mktemp("metrics") / "rank.prom"
    metrics.write(snapshots, path)
    assert metrics.parsed(path.read_text()) == latest
    writer = Writer()
    metrics.add_scalars(writer, latest, 7)
    numbers = sorted(value for name, value in latest.items() if name != "rank")
    assert sorted(value for value, _ in writer.scalars.values()) == numbers
    assert {step for _, step in writer.scalars.values()} == {7}


def test_names_are_as_opentelemetry_and_prometheus_want_them():
    names = [metric.name for metric in METRICS.values()]
    assert len(set(names)) == len(names)
    for metric in METRICS.values():
        assert re.fullmatch(r"thinwire(\.[a-z_]+){2}", metric.name)
        assert re.fullmatch(r"s|By|1||\{[a-z]+\}", metric.unit)
        assert not any(other.startswith(f"{metric.name}.") for other in names)  # a name is no namespace
        assert metric.prometheus.endswith({"s": "_seconds", "By": "_bytes", "1": "_ratio"}.get(metric.unit, ""))


def test_what_prometheus_scrapes(served):
    stats, snapshots, url = served
    stats.clear()
    stats.update({"rank": 3, "bytes_sent": 5, "seconds_awaited_of_1": 0.5, "loss": 2.0})
    snapshots.take()
    text = page_of(url)
    assert 'thinwire_exchange_sent_bytes_total{thinwire_rank="3"} 5.0' in text
    assert 'thinwire_peer_awaited_seconds_total{thinwire_peer="1",thinwire_rank="3"} 0.5' in text
    assert "loss" not in text


def test_tensorboard_has_a_scalar_for_each_peer():
    writer = Writer()
    metrics.add_scalars(writer, {"rank": 0, "steps": 4, "late_seconds_of_2": 0.25}, 4)
    assert writer.scalars == {"thinwire/step.taken": (4, 4), "thinwire/peer.lateness/2": (0.25, 4)}


def test_a_file_of_otlp_json_holds_every_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = PeriodicExportingMetricReader(FileMetricExporter(path), export_interval_millis=3_600_000)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    snapshots = Snapshots(lambda: {"rank": 1, "bytes_sent": 12, "residual_norm": 0.5})
    metrics.observe(snapshots, provider.get_meter("test"))
    provider.shutdown()
    (line,) = path.read_text().splitlines()
    told = {each["name"]: each for each in json.loads(line)["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]}
    sent = told["thinwire.exchange.sent"]
    assert (sent["unit"], sent["sum"]["isMonotonic"]) == ("By", True)
    (point,) = sent["sum"]["dataPoints"]
    assert int(point["asInt"]) == 12
    assert point["attributes"] == [{"key": RANK, "value": {"stringValue": "1"}}]
    assert told["thinwire.residual.norm"]["gauge"]["dataPoints"][0]["asDouble"] == 0.5


@pytest.mark.slow
def test_only_the_thread_that_trains_asks_for_statistics():
    asked, steps = set(), 0

    def stats():
        asked.add(threading.get_ident())
        return {"rank": 0, "steps": steps}

    snapshots = Snapshots(stats, every=0.0)
    with metrics.serving(snapshots, 0) as port:
        said = []

        def scrape():
            for _ in range(20):
                said.append(metrics.parsed(page_of(f"http://127.0.0.1:{port}/metrics"))["steps"])

        scrapers = [threading.Thread(target=scrape) for _ in range(2)]
        for each in scrapers:
            each.start()
        while any(each.is_alive() for each in scrapers):
            steps += 1
            snapshots.update()
        for each in scrapers:
            each.join()
    assert asked == {threading.get_ident()}
    assert len(said) == 40
    assert max(said) <= steps


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@given(st.lists(st.tuples(st.floats(1e-3, 10.0), st.floats(0.0, 1.0)), max_size=60), st.floats(0.0, 5.0))
def test_snapshots_take_their_share_of_the_time_and_no_more(steps, every):
    clock, costs, times = Clock(), [], []
    cost = 0.0

    def stats():
        times.append(clock.now)
        clock.now += cost
        costs.append(cost)
        return {}

    snapshots = Snapshots(stats, every=every, clock=clock)
    for seconds, cost in steps:  # noqa: B007 - stats() reads it
        clock.now += seconds
        snapshots.update()
    assert sum(costs[:-1]) <= SHARE * clock.now * (1 + 1e-9)
    assert all(later - earlier >= every - 1e-9 for earlier, later in pairwise(times))
    before = len(times)
    snapshots.take()
    assert len(times) == before + 1


def test_a_snapshot_is_never_changed():
    stats = {"rank": 0, "steps": 1}
    snapshots = Snapshots(lambda: stats)
    first = snapshots.latest
    stats["steps"] = 2
    snapshots.take()
    assert (first["steps"], snapshots.latest["steps"]) == (1, 2)
    assert snapshots.latest["seconds"] > first["seconds"]


def test_an_interval_is_no_negative_number():
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="expected 0 or more"):
            Snapshots(dict, every=wrong)


@pytest.mark.slow
def test_a_port_that_is_taken_or_none_is_told_in_one_line():
    snapshots = Snapshots(dict)
    with metrics.serving(snapshots, 0) as port:
        with (
            pytest.raises(
                OSError, match=rf"port {port} of 0\.0\.0\.0 \(Address already in use\): .*of its own$"
            ) as told,
            metrics.serving(snapshots, port),
        ):
            pass
        assert "\n" not in str(told.value)
    with metrics.serving(snapshots, port):  # it is free again
        pass
    with pytest.raises(OSError, match="port 70000"), metrics.serving(snapshots, 70_000):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_meanwhile_does_not_hold_the_port():
    """As a DataLoader's workers, which live on with copies of all sockets."""
    forks = multiprocessing.get_context("fork")
    ends = forks.Event()
    worker = forks.Process(target=ends.wait)
    with metrics.serving(Snapshots(dict), 0, address="127.0.0.1") as port:
        worker.start()
    try:
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with metrics.serving(Snapshots(dict), port, address="127.0.0.1"):
            pass
    finally:
        ends.set()
        worker.join()


@pytest.mark.parametrize(
    ("lacking", "use"),
    [
        ("prometheus_client", lambda snapshots: metrics.serving(snapshots, 0).__enter__()),
        ("prometheus_client", lambda snapshots: metrics.write(snapshots, "rank.prom")),
        ("prometheus_client", lambda snapshots: metrics.parsed("")),
        ("opentelemetry-sdk", lambda snapshots: metrics.observe(snapshots, None)),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_remedy(monkeypatch, lacking, use):
    def absent(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=f"pip install {lacking}$"):
        use(Snapshots(dict))


def test_another_programs_metrics_are_no_statistics():
    assert metrics.parsed("# TYPE process_open_fds gauge\nprocess_open_fds 9.0\n") == {}
    with pytest.raises(ValueError, match="invalid metric name"):
        metrics.parsed("<html>not found</html>\n")
