"""Traces that viewers show whole."""

import resource
from itertools import pairwise

import pytest
import torch
from communicators import SimulatedWorld
from communicators.timeline import on_tracks
from communicators.tracing import exported, recording, trace_of, write_trace
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import profile

pytestmark = pytest.mark.quick


def bar(name, ts, dur, tid=7):
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}


spans = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.sampled_from(["exchange", "gloo:recv", "merge"])))


@given(spans)
def test_what_goes_on_side_by_side_is_on_as_few_tracks_as_hold_it(given_spans):
    events = on_tracks([bar(name, ts, dur) for ts, dur, name in given_spans])
    bars = [event for event in events if event["ph"] == "X"]
    assert [(b["ts"], b["dur"], b["name"]) for b in bars] == given_spans
    assert {b["tid"] for b in bars if b["name"] == "merge"} <= {7}
    for kind, name in (("exchanges", "exchange"), ("messages", "gloo:recv")):
        mine = [b for b in bars if b["name"] == name]
        tracks = {b["tid"] for b in mine}
        at_once = [sum(b["ts"] <= t < b["ts"] + b["dur"] for b in mine) for t in range(30)]
        assert all(track.startswith(kind) for track in tracks)
        assert max(at_once) <= len(tracks) <= max(max(at_once), bool(mine)) + sum(b["dur"] == 0 for b in mine)
        for track in tracks:
            held = sorted((b["ts"], b["ts"] + b["dur"]) for b in mine if b["tid"] == track)
            assert all(one[1] <= other[0] for one, other in pairwise(held))
    named = [event["tid"] for event in events if event["ph"] == "M"]
    assert sorted(named) == sorted({b["tid"] for b in bars if b["tid"] != 7})


def test_a_trace_of_nothing_is_one(tmp_path):
    with recording() as recorded:
        pass
    write_trace(recorded, tmp_path / "trace.json")
    assert "traceEvents" in (tmp_path / "trace.json").read_text()


def test_what_is_no_bar_of_ours_stays_where_it_is():
    others = [
        {**bar("exchange", 0, 5), "cat": "cpu_op"},
        {**bar("exchange", 1, 5), "ph": "i"},
        {**bar("gloo:recv", 2, 5), "ph": "f", "cat": "flow"},
    ]
    assert on_tracks([dict(event) for event in others]) == others


@pytest.fixture
def recorded():
    with recording() as found:
        torch.ones(3) + 1
    return found


def test_a_full_temporary_folder_is_named(recorded):
    """Torch says nothing where it can write only a part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=r"make room, or set TMPDIR to another folder: '/"):
            trace_of(recorded)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_rank_without_its_trace_raises_and_the_others_do_not_wait_for_it(recorded, monkeypatch):
    monkeypatch.setattr(profile, "export_chrome_trace", lambda _, path: None)  # as on a disk that takes no file at all

    def rank(comm):
        try:
            return trace_of(recorded if comm.rank == 1 else None, comm)
        except OSError as error:
            return error.strerror

    none, why = SimulatedWorld(2).run(rank)
    assert none is None
    assert "TMPDIR" in why


def test_a_trace_that_was_exported_may_be_asked_for_again(recorded):
    """Torch exports a profile only once."""
    kept = exported(recorded)
    first, second = trace_of(kept), trace_of(kept)
    assert first == second
    with pytest.raises(RuntimeError, match="already saved"):
        trace_of(recorded)
