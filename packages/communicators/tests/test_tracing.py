"""Traces that viewers show whole."""

from itertools import pairwise

import pytest
from communicators.timeline import on_tracks
from communicators.tracing import recording, write_trace
from hypothesis import given
from hypothesis import strategies as st

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
