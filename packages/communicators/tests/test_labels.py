"""Names on a profiler's trace."""

import gzip
import json
import threading

import pytest
import torch
from communicators.labels import spanning, unseen
from communicators.tracing import exported, labelled, recording
from torch.profiler import ProfilerActivity, profile


def test_a_block_has_its_name_where_a_profiler_records_and_is_nothing_else_where_none_does() -> None:
    before = labelled("select")
    with profile(activities=[ProfilerActivity.CPU]) as recorded, labelled("select"), labelled("merge"):
        pass
    assert [event.key for event in recorded.key_averages() if event.key in ("select", "merge")] == ["select", "merge"]
    assert before is labelled("merge") is labelled("select")  # one object that does nothing


def elsewhere(call):
    thread = threading.Thread(target=call, name="another")
    thread.start()
    thread.join()


def labelled_block(name):
    with labelled(name):
        pass


def named(trace, name):
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_labels_of_all_threads_are_on_the_trace_of_a_recording_once_each():
    here, other = threading.get_native_id(), []
    with recording() as recorded:
        across = spanning("across")
        across.__enter__()
        with labelled("both"):
            torch.ones(3)

        def work():
            other.append(threading.get_native_id())
            with labelled("both"):
                across.__exit__(None, None, None)

        elsewhere(work)
    spanning("late").__enter__()
    trace = exported(recorded)
    both, [across] = named(trace, "both"), named(trace, "across")
    assert sorted(event["tid"] for event in both) == sorted([here, *other])
    assert across["tid"] == here
    [mine], [theirs] = ([event for event in both if event["tid"] == tid] for tid in (here, *other))
    assert across["ts"] <= mine["ts"] + 50  # two clocks
    assert mine["ts"] + mine["dur"] <= theirs["ts"] + 50
    assert theirs["ts"] <= across["ts"] + across["dur"] <= theirs["ts"] + theirs["dur"]
    [ones] = named(trace, "aten::ones")
    assert mine["ts"] <= ones["ts"] <= ones["ts"] + ones["dur"] <= mine["ts"] + mine["dur"]


def test_threads_that_run_yet_have_their_names():
    end = threading.Event()
    with recording() as recorded:
        begun = threading.Event()

        def work():
            labelled_block("work")
            begun.set()
            end.wait()

        thread = threading.Thread(target=work, name="another")
        thread.start()
        begun.wait()
    names = {event["tid"]: event["args"]["name"] for event in named(exported(recorded), "thread_name")}
    end.set()
    thread.join()
    assert names[thread.native_id] == "another"


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch's own, with any schedule
def test_each_cycle_of_a_schedule_has_its_own_labels(tmp_path):
    files = []

    def ready(recorded):
        files.append(tmp_path / f"{len(files)}.json.gz")
        recorded.export_chrome_trace(str(files[-1]))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    with recording(schedule=schedule, on_trace_ready=ready) as recorded:
        for step in range(7):
            elsewhere(lambda step=step: labelled_block(f"step {step}"))
            recorded.step()
    found = [json.loads(gzip.decompress(path.read_bytes())) for path in files]
    assert [[f"step {step}" for step in range(7) if named(trace, f"step {step}")] for trace in found] == [
        ["step 2"],
        ["step 5"],
    ]


def test_torch_s_own_handler_writes_the_labels_of_all_threads_too(tmp_path):
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path), use_gzip=True)
    with recording(on_trace_ready=handler):
        elsewhere(lambda: labelled_block("work"))
    [path] = tmp_path.iterdir()
    assert len(named(json.loads(gzip.decompress(path.read_bytes())), "work")) == 1


def test_what_is_begun_unseen_is_not_on_a_profile_and_what_follows_is():
    def fails():
        raise OSError("not posted")

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        assert unseen(lambda: torch.ones(3).add(1).sum()) == 6
        with pytest.raises(OSError, match="not posted"):
            unseen(fails)
        torch.ones(3).mul(2)
    seen = {event.key for event in recorded.key_averages()}
    assert "aten::mul" in seen
    assert not seen & {"aten::add", "aten::sum"}
