"""Ranks succeed together or fail together, with one reason."""

import pytest
from communicators import Communicator, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from thinwire_trainer.agreement import all_or_none, gather_texts, require_same
from thinwire_trainer.errors import AgreedError, RunError

pytestmark = pytest.mark.quick


@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=6))
def test_gather_texts(texts: list[str]) -> None:
    assert SimulatedWorld(len(texts)).run(lambda comm: gather_texts(texts[comm.rank], comm)) == [texts] * len(texts)


@pytest.mark.parametrize("failing", [{0}, {2}, {1, 3}, {0, 1, 2, 3}])
@pytest.mark.parametrize("kind", [RunError, OSError])
def test_a_failure_on_any_rank_is_every_ranks_failure(failing: set[int], kind: type[Exception]) -> None:
    def write(comm: Communicator) -> None:
        with all_or_none(comm):
            if comm.rank in failing:
                raise kind(f"disk {comm.rank} is full")

    def body(comm: Communicator) -> str:
        with pytest.raises(AgreedError) as failure:
            write(comm)
        return str(failure.value)

    reasons = set(SimulatedWorld(4).run(body))
    assert len(reasons) == 1
    assert f"disk {min(failing)} is full" in reasons.pop()


def test_success_is_silent() -> None:
    def body(comm: Communicator) -> int:
        with all_or_none(comm):
            return comm.rank

    assert SimulatedWorld(3).run(body) == [0, 1, 2]


def test_other_settings_on_one_rank_are_named() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(AgreedError) as failure:
            require_same({"lr": 0.1, "density": 0.5 if comm.rank == 2 else 0.01}, comm)
        return str(failure.value)

    reasons = set(SimulatedWorld(3).run(body))
    assert reasons == {
        "rank 0 was started with --density 0.01, rank 2 with --density 0.5: start all ranks with the same flags"
    }
    SimulatedWorld(3).run(lambda comm: require_same({"lr": 0.1}, comm))
