"""Check of a file in the trace event format, as viewers read it."""

import json
from collections import Counter, defaultdict

LETTERS = {"X", "M", "s", "f", "i"}
ERROR_US = 200.0
"""Largest difference between the clocks of ranks on one machine, as profilers read them."""


def bars(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def arrows(trace):
    """Both ends of each arrow between ranks."""
    ends = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf" and event["cat"] == "message":
            assert event["ph"] not in ends[event["id"]], f"an arrow has two {event['ph']}: {event}"
            ends[event["id"]][event["ph"]] = event
    assert all(set(both) == {"s", "f"} for both in ends.values()), "an arrow has one end alone"
    return [(both["s"], both["f"]) for both in ends.values()]


def check_trace(trace, *, error=ERROR_US):
    """Raises AssertionError for what a viewer would leave out or show wrong."""
    json.dumps(trace, allow_nan=False)
    for event in trace["traceEvents"]:
        assert event["ph"] in LETTERS, event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int | str), event
        if event["ph"] == "M":
            assert event["name"].startswith(("process_", "thread_")), event
        else:
            assert isinstance(event["ts"], int | float), event
        assert event["ph"] != "X" or event["dur"] >= 0, event
    on_track = defaultdict(list)
    for one in bars(trace):
        on_track[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for sent, came in arrows(trace):
        assert sent["pid"] != came["pid"], sent
        assert came["ts"] >= sent["ts"] - error, (sent, came)
        for end in (sent, came):
            held = on_track[end["pid"], end["tid"]]
            assert any(began <= end["ts"] <= ended for began, ended in held), f"an arrow ends in no bar: {end}"
    for track, spans in on_track.items():
        if isinstance(track[1], str):  # a track of ours
            _check_nested(track, sorted(spans, key=lambda span: (span[0], -span[1])))
    names = Counter(event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name")
    assert set(names.values()) <= {1}, names


def _check_nested(track, spans, slack=1e-6):
    opened = []
    for began, ended in spans:
        while opened and opened[-1] <= began + slack:
            opened.pop()
        assert not opened or ended <= opened[-1] + slack, (
            f"bars overlap on {track}: one ends at {opened}, {began, ended}"
        )
        opened.append(ended)
