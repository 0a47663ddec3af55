"""thinwire top: figures of a frame, who is late, and plain lines for what is not there or no more."""

import io
import json
import re
import time
from contextlib import ExitStack
from pathlib import Path

import prometheus_client
import pytest
from communicators import metrics
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from thinwire.__main__ import main
from thinwire.top import command, places
from thinwire.top.command import look, watch
from thinwire.top.places import Endpoints, NothingHere, RunFolder, place_of
from thinwire.top.view import COLUMNS, Seen, frame

pytestmark = pytest.mark.quick


def console():
    return Console(file=io.StringIO(), width=84)


def text_of(*ranks, **settings):
    shown = console()
    shown.print(frame(ranks, **settings))
    return shown.file.getvalue()


def seen(rank=0, *, steps=(10, 20), **grows):
    """A rank that has taken so many steps. grows: by name, numbers before and now, or one that stays."""
    pairs = {name: value if isinstance(value, tuple) else (value, value) for name, value in grows.items()}
    first, now = ({"rank": rank, "ranks": 2, "generation": 1, "steps": s, "seconds": float(s)} for s in steps)
    found = Seen({**first, **{name: pair[0] for name, pair in pairs.items()}})
    found.take({**now, **{name: pair[1] for name, pair in pairs.items()}})
    return found


def row(text, rank):
    line = next(line for line in text.splitlines() if re.match(rf" *{rank} ", line))
    return dict(zip(COLUMNS, line.split(maxsplit=len(COLUMNS) - 2), strict=False))


def test_a_row_tells_what_a_step_went_to():
    one = seen(
        seconds=(5.0, 7.0),
        seconds_selecting=(0.0, 0.1),
        seconds_waited=(1.0, 1.5),
        seconds_hidden=(0.0, 0.25),
        seconds_exchanging=(1.0, 1.75),
        bytes_sent=(0, 750_000),
        seconds_awaited_of_1=(0.0, 0.5),
        seconds_awaited_of_3=(9.0, 9.1),
        residual_norm=2.0,
        verified_step=16,
        verified_hash=5,
    )
    text = text_of(one)
    assert text.splitlines()[0] == "1 of 2 ranks, generation 1, step 20, residual 2, compared at step 16"
    assert re.search(r"^ *0 +20 +200\.0 +140\.0 +10\.0 +50\.0 +25\.0 +75\.0 kB +8\.0 +1: 50\.0 ms$", text, re.MULTILINE)
    assert "late" not in text


@given(*[st.floats(0, 100)] * 3, st.integers(1, 50))
def test_a_steps_parts_add_up(computing, selecting, waited, steps):
    total = computing + selecting + waited
    text = text_of(
        seen(
            steps=(0, steps),
            seconds=(0.0, total),
            seconds_selecting=(0.0, selecting),
            seconds_waited=(0.0, waited),
        )
    )
    found = row(text, 0)
    parts = [float(found[name]) for name in ("compute", "select", "wait")]
    assert sum(parts) == pytest.approx(float(found["ms"]), abs=0.16)
    assert float(found["ms"]) == pytest.approx(1e3 * total / steps, abs=0.06)


def test_a_step_that_does_not_end_is_seen_to_take_long_and_a_restart_counts_from_there():
    one = seen(seconds=(10.0, 20.0))
    assert row(text_of(one), 0)["ms"] == "1000.0"
    one.take({**one.now, "seconds": 120.0})
    assert row(text_of(one), 0)["ms"] == "11000.0"
    one.take({**one.now, "steps": 21, "seconds": 121.0})
    assert row(text_of(one), 0)["ms"] == "101000.0"  # the long one, which has begun when step 20 was there
    one.take({**one.now, "steps": 22, "seconds": 122.0})
    assert row(text_of(one), 0)["ms"] == "1000.0"
    one.take({**one.now, "steps": 5, "seconds": 1.0})
    assert row(text_of(one), 0) == {"rank": "0", "step": "5"}


def test_the_rank_is_late_that_others_wait_for_or_that_rounds_name():
    waits = [seen(rank, seconds_waited=(0.0, waited)) for rank, waited in enumerate((4.0, 0.1, 4.2))]
    assert "rank 1 is late by 400 ms a step" in text_of(*waits)
    alike = [seen(rank, seconds_waited=(0.0, 4.0 + 0.01 * rank)) for rank in range(3)]
    assert "is late" not in text_of(*alike)
    told = {"late_seconds_of_0": 0.0, "late_seconds_of_1": 0.01, "late_seconds_of_2": 0.7}
    rounds = [seen(rank, seconds_waited=(0.0, 1.0), **told) for rank in range(3)]
    assert "rank 2 is late by 695 ms a step" in text_of(*rounds)


def test_what_is_out_of_order_is_told_in_a_line_each():
    now = time.time()
    ranks = [
        seen(0, generation=2, verified_step=8, verified_hash=1, taken_at=now),
        seen(1, generation=2, verified_step=8, verified_hash=2, taken_at=now - 100),
        seen(0, generation=2, verified_step=8, verified_hash=3, part=1),  # of HSDP, another part
        seen(0, taken_at=now - 100),
        seen(4, generation=2),
    ]
    ranks[4].gone = True
    said = text_of(*ranks, now=now, silent=["http://node:1/metrics"]).splitlines()
    assert said[0] == "3 of 2 ranks, generation 2, step 20, compared at step 8"
    assert "parameters differ at step 8: ranks [0] against ranks [1]" in said
    assert "rank 1 has been silent for 100 s" in said
    assert "rank 0 of generation 1 is not seen in generation 2" in said
    assert "rank 4 has gone after step 20" in said
    assert sum("silent" in line for line in said) == 1
    assert "http://node:1/metrics does not answer" in said


@pytest.fixture
def job():
    """Statistics of three ranks, served on ports that follow one another: ports, and what ends each."""
    for base in range(21_000, 21_300, 3):
        with ExitStack() as stack:
            try:
                ends = [stack.enter_context(ExitStack()) for _ in range(3)]
                for rank, end in enumerate(ends):
                    counts = iter(range(1000))
                    stats = lambda rank=rank, counts=counts: {"rank": rank, "ranks": 3, "steps": next(counts)}  # noqa: E731
                    snapshots = metrics.Snapshots(stats)
                    end.enter_context(metrics.serving(snapshots, base + rank, address="127.0.0.1"))
                    ends[rank].snapshots = snapshots
            except OSError:
                continue
            yield base, ends
            return
    pytest.skip("no three ports that follow one another are free")


@pytest.mark.slow
def test_one_endpoint_stands_for_all_of_its_machine_and_a_rank_that_vanishes_is_told(job):
    base, ends = job
    place, found = place_of([f"127.0.0.1:{base + 1}"]), {}
    look(place, found)
    assert sorted(found) == [f"http://127.0.0.1:{base + rank}/metrics" for rank in range(3)]
    for end in ends:
        end.snapshots.take()
    ends[2].close()
    shown = console()
    shown.print(look(place, found))
    assert "2 of 3 ranks, step 1" in shown.file.getvalue()
    assert "rank 2 has gone after step 0" in shown.file.getvalue()


@pytest.mark.slow
def test_a_rank_that_was_never_there_is_told(job):
    base, ends = job
    ends[1].close()
    shown = console()
    shown.print(look(place_of([f"127.0.0.1:{base}"]), {}))
    assert f"http://127.0.0.1:{base + 1}/metrics does not answer" in shown.file.getvalue()


@pytest.mark.parametrize("given", [9464, 9467])
def test_ranks_of_other_machines_are_not_missed_on_this_one(given, monkeypatch):
    """Of twelve in all, 4, 5 and 7 are here, and 6 of them is silent."""
    here = {9464 + local: {"rank": 4 + local, "ranks": 12} for local in (0, 1, 3)}

    def told(url):
        port = int(url.split(":")[2].partition("/")[0])
        if port not in here:
            raise NothingHere(f"nothing answers at {url}")
        return here[port]

    monkeypatch.setattr(places, "_told", told)
    place = place_of([f"node:{given}"])
    assert [stats["rank"] for stats in place.read().values()] == [4, 5, 7]
    assert place.silent == ["http://node:9466/metrics"]
    del here[9467]
    here[9468] = {"rank": 8, "ranks": 12}  # has come later
    assert [stats["rank"] for stats in place.read().values()] == [4, 5, 8]


def test_a_job_that_ends_while_it_is_watched_is_told_in_a_line(job, monkeypatch):
    base, ends = job
    naps = iter(range(100))

    def sleep(seconds):
        for end in ends:
            end.snapshots.take()
        if next(naps) == 2:
            for end in ends:
                end.close()

    monkeypatch.setattr(command.time, "sleep", sleep)
    shown = console()
    assert watch(place_of([f"127.0.0.1:{base}"]), shown, 1.0, once=False) == "the job has ended, after step 2"
    assert "rank 1 has gone" in shown.file.getvalue()


@pytest.mark.slow
def test_once_prints_a_frame_as_soon_as_steps_were_taken(job, monkeypatch):
    base, ends = job
    monkeypatch.setattr(command.time, "sleep", lambda seconds: [end.snapshots.take() for end in ends])
    shown = console()
    assert watch(place_of([f"127.0.0.1:{base}"]), shown, 1.0, once=True) == ""
    assert shown.file.getvalue().startswith("3 of 3 ranks, step 1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["localhost:1"], "nothing answers at http://localhost:1/metrics ([Errno 111] Connection refused): start the"),
        (["no-such-host.invalid:9464"], "nothing answers at http://no-such-host.invalid:9464/metrics ("),
        (["localhost:99999"], "localhost:99999 holds no run: give the --output of one, or HOST:PORT"),
        (["localhost:1", "localhost:65536"], "'localhost:65536' given, expected HOST:PORT of each rank, or one run's"),
        (["http://"], "nothing answers at http:// ("),
        (["no/such/folder"], "no/such/folder holds no run: give the --output of one, or HOST:PORT"),
        (["localhost:1", "runs"], "'runs' given, expected HOST:PORT of each rank, or one run's folder"),
    ],
)
def test_a_wrong_place_is_one_line(given, said, capsys):
    assert main(["top", *given]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"thinwire top: {said}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_another_programs_endpoint_is_no_training(capsys):
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("open_files", "Files.", registry=registry).set(7)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    assert main(["top", f"127.0.0.1:{server.server_port}"]) == 1
    server.shutdown()
    server.server_close()
    thread.join()
    assert "holds no metrics of thinwire: another program's endpoint" in capsys.readouterr().err


def run_folder(tmp_path, *rows):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def epoch(number, **numbers):
    phases = {"evaluation_seconds": 2.0, "selection_seconds": 1.0, "exchange_seconds": 3.0}
    return {"epoch": number, "steps": 10 * number, "world_size": 4, "seconds": 12.0, "bytes_sent": 500, **phases}


def test_a_run_without_live_files_is_shown_by_its_epochs(tmp_path):
    folder, found = run_folder(tmp_path, epoch(1)), {}
    look(place_of([str(folder)]), found)
    run_folder(tmp_path, epoch(1), epoch(2))
    shown = console()
    shown.print(look(place_of([str(folder)]), found))
    text = shown.file.getvalue()
    assert text.startswith("1 of 4 ranks, step 20, epoch 2 of rank 0; --metrics file shows all")
    assert re.search(r"^ *0 +20 +1000\.0 +600\.0 +100\.0 +300\.0 +50 bytes", text, re.MULTILINE)


def test_the_live_files_of_a_run_are_its_ranks_until_they_are_deleted(tmp_path):
    folder, found = run_folder(tmp_path, epoch(1)), {}
    (folder / "live").mkdir()
    files = [folder / "live" / f"node-{pid}.prom" for pid in (7, 8)]
    for rank, file in enumerate(files):
        stats = {"rank": rank, "ranks": 2, "generation": 3, "steps": 5}
        metrics.write(metrics.Snapshots(lambda stats=stats: stats), file)
    place = place_of([str(folder)])
    look(place, found)
    assert sorted(found) == ["node-7", "node-8"]
    files[1].unlink()
    look(place, found)
    assert [each.gone for each in found.values()] == [False, True]
    files[0].unlink()
    (folder / "model.pt").touch()
    look(place, found)
    assert all(each.gone for each in found.values())


@pytest.mark.parametrize(("model", "said"), [(True, "has ended"), (False, "no epoch yet")])
def test_a_run_that_has_ended_or_shows_nothing_yet_is_one_line(tmp_path, capsys, model, said):
    folder = run_folder(tmp_path)
    if model:
        (folder / "model.pt").touch()
    assert main(["top", str(folder)]) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_file_of_another_kind_among_the_live_ones_is_named(tmp_path, capsys):
    folder = run_folder(tmp_path)
    (folder / "live").mkdir()
    (folder / "live" / "other.prom").write_text("<html>\n")
    assert main(["top", str(folder)]) == 1
    assert "other.prom holds no metrics of thinwire" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_word(monkeypatch, capsys, job):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupted)
    assert main(["top", f"127.0.0.1:{job[0]}"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("given", [["a:1"], ["http://a/metrics"], ["https://a:1/"], ["a:1", "b:2"], ["127.0.0.1:80"]])
def test_addresses_are_endpoints(given):
    assert isinstance(place_of(given), Endpoints)


def test_what_is_one_and_no_address_or_is_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a:1").mkdir()
    assert all(isinstance(place_of([given]), RunFolder) for given in ("a:1", "run", "run:", ":1"))
    with pytest.raises(NothingHere, match="'b' given, expected HOST:PORT of each rank"):
        place_of(["a:1", "b"])
