"""Timelines of several ranks: clocks within their bounds, every message once, and a file that viewers take."""

import copy
import json
from itertools import pairwise

import pytest
import torch
from communicators import Dies, SimulatedWorld, allreduce, run, start, timeline, tracing
from communicators.schedules import dense
from hypothesis import given
from hypothesis import strategies as st
from traces import arrows, bars, check_trace

pytestmark = pytest.mark.quick

SECOND = 1_000_000_000


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=5), st.floats(0, 1e-2), st.integers(0, 99))
def test_clocks_are_compared_within_the_bound(ahead, jitter, seed):
    ahead = [0.0, *ahead]

    def body(comm):
        def clock():
            return int((1000 + comm.clock() + ahead[comm.rank]) * SECOND)

        schedule = timeline.compared_clocks(comm.rank, comm.size, clock, machine=comm.rank)
        return run(schedule, comm, facts="clocks")

    found, *_ = SimulatedWorld(len(ahead), seed=seed, jitter=jitter).run(body)
    for (measured, bound), true in zip(found, ahead, strict=True):
        assert abs(measured - true * 1e6) <= bound + 0.1
        assert bound <= 1e3 + jitter * 1e6


def test_ranks_of_one_machine_have_one_clock():
    def body(comm):
        clock = lambda: int(comm.clock() * SECOND) + comm.rank  # noqa: E731
        return run(timeline.compared_clocks(comm.rank, comm.size, clock, machine=7), comm, facts="clocks")

    assert SimulatedWorld(3).run(body)[0] == [(0.0, 0.0)] * 3


def label(name, began, ended, tid=5):
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 77, "tid": tid, "ts": began, "dur": ended - began}


messages = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1000), st.integers(1, 500), st.integers(0, 3)),
    max_size=20,
)


@given(messages, st.lists(st.integers(-(10**6), 10**6), min_size=4, max_size=4))
def test_each_message_is_one_arrow_whatever_the_clocks(sent, ahead):
    """Ranks number their peers as in their group, and clocks differ by known amounts."""
    events = [[] for _ in range(4)]
    sent = [one for one in sent if one[0] != one[1]]
    for number, (source, target, began, seconds, key) in enumerate(sent):
        key = f"{key}.{number}"
        group = [4, 4]  # numbers that say nothing
        begin, end = 10 * began, 10 * (began + seconds)
        events[source].append(label(timeline.message("to", group[0], 100, key), begin, begin + 1))
        events[target].append(label(timeline.message("from", group[1], 120, key), begin - 50, end))
    for rank, own in enumerate(events):
        for event in own:
            event["ts"] += ahead[rank]
    traces = [timeline.Recorded(timeline.named_messages(own), 0, 77, "host") for own in events]
    trace = timeline.merged(traces, [(float(offset), 1.0) for offset in ahead])
    check_trace(trace)
    found = sorted((s["pid"], f["pid"], s["ts"], round(f["ts"], 2)) for s, f in arrows(trace))
    told = sorted((s, t, 10 * b, round(10 * (b + seconds) - 1e-3, 2)) for s, t, b, seconds, _ in sent)
    assert found == told


def test_what_one_side_has_not_recorded_has_no_arrow():
    known = timeline.named_messages([label(timeline.message("to", 1, 100, "a"), 0, 1)])
    traces = [timeline.Recorded(known, 0, 77, "host"), None]
    trace = timeline.merged(traces, [(0.0, 0.0), (0.0, 3.0)])
    check_trace(trace)
    assert [bar["name"] for bar in bars(trace)] == ["to rank 1: 100 B"]
    assert arrows(trace) == []


def test_ends_before_the_beginning_are_within_the_clocks_error_or_no_message():
    def merged(late):
        sent = [label(timeline.message("to", 1, 100, "a"), 1000, 1001)]
        came = [label(timeline.message("from", 0, 100, "a"), 0, 1000 - late)]
        traces = [timeline.Recorded(timeline.named_messages(own), 0, 77, "") for own in (sent, came)]
        trace = timeline.merged(traces, [(0.0, 0.0), (0.0, 20.0)])
        check_trace(trace)
        return len(arrows(trace))

    assert merged(2 * timeline.SLACK_US + 19) == 1
    assert merged(2 * timeline.SLACK_US + 21) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_simulated_world_in_virtual_time(size, tmp_path):
    world = SimulatedWorld(size, records=True)

    def body(comm):
        comm.elapse(1e-3 * (comm.rank + 1))
        work = start(dense.allreduce(torch.ones(1000), comm.rank, comm.size), comm, facts="in the background")
        comm.elapse(1e-4)
        work.wait()
        return allreduce(torch.ones(10), comm, native=False)

    world.run(body)
    world.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_trace(trace)
    messages = arrows(trace)
    assert len(messages) == sum(world.messages_sent)
    sent = [one for one in bars(trace) if one["name"].startswith("to rank ")]
    for rank in range(size):
        assert sum(one["args"]["bytes"] for one in sent if one["pid"] == rank) == world.bytes_sent[rank]
        computed = [one for one in bars(trace) if one["pid"] == rank and one["name"] == "compute"]
        assert sum(one["dur"] for one in computed) == pytest.approx(1e3 * (rank + 1) + 100)
        waited = [one for one in bars(trace) if one["pid"] == rank and one["name"] == "wait"]
        assert sum(one["dur"] for one in [*computed, *waited]) == pytest.approx(1e6 * world.elapsed, rel=0.2)
    assert max(f["ts"] for _, f in messages) <= 1e6 * world.elapsed if messages else size == 1


def test_a_world_keeps_no_timeline_unless_asked():
    world = SimulatedWorld(2)
    world.run(lambda comm: allreduce(torch.ones(10), comm, native=False))
    assert world.timeline.sent == []
    with pytest.raises(ValueError, match="make it with records=True"):
        world.write_trace("nowhere.json")


def test_a_rank_that_died_leaves_what_it_has_sent(tmp_path):
    world = SimulatedWorld(3, records=True, faults=[Dies(1, message=1)])
    with pytest.raises(Exception, match="rank 1 died"):
        world.run(lambda comm: allreduce(torch.ones(10_000), comm, native=False))
    world.write_trace(tmp_path / "trace.json")
    check_trace(json.loads((tmp_path / "trace.json").read_text()))


def test_ranks_that_recorded_nothing_write_nothing(tmp_path):
    SimulatedWorld(2).run(lambda comm: tracing.write_trace(None, tmp_path / "trace.json", comm))
    assert not (tmp_path / "trace.json").exists()


def test_a_trace_is_found_wrong(tmp_path):
    """The check of this module tells what is broken."""
    world = SimulatedWorld(2, records=True)
    world.run(lambda comm: allreduce(torch.ones(10), comm, native=False))
    good = world.timeline.trace()
    check_trace(good)
    (tail, head), *_ = arrows(good)
    for change in ("no head", "early head", "stranger", "overlap"):
        trace = copy.deepcopy(good)
        events = trace["traceEvents"]
        if change == "no head":
            events.remove(head)
        elif change == "early head":
            next(event for event in events if event == head)["ts"] = tail["ts"] - 1e5
        elif change == "stranger":
            next(event for event in events if event == head)["tid"] = "elsewhere"
        else:
            one, other = next(iter(pairwise(bars(trace))))
            other |= {"pid": one["pid"], "tid": one["tid"], "ts": one["ts"] + one["dur"] / 2, "dur": one["dur"]}
        with pytest.raises(AssertionError):
            check_trace(trace)
