"""Names on a profiler's trace."""

from communicators.tracing import labelled
from torch.profiler import ProfilerActivity, profile


def test_a_block_has_its_name_where_a_profiler_records_and_is_nothing_else_where_none_does() -> None:
    before = labelled("select")
    with profile(activities=[ProfilerActivity.CPU]) as recorded, labelled("select"), labelled("merge"):
        pass
    assert [event.key for event in recorded.key_averages() if event.key in ("select", "merge")] == ["select", "merge"]
    assert before is labelled("merge") is labelled("select")  # one object that does nothing
