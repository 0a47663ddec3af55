"""The end of a call, which threads wait for."""

import threading

from communicators.background.engine import Ending


def test_before_it_comes_a_wait_ends_in_time():
    ending = Ending()
    assert not ending.is_set()
    assert not ending.wait(0.0)
    assert not ending.wait(0.01)


def test_all_who_wait_go_on_and_later_ones_do_not_wait():
    ending, went_on = Ending(), []
    waiting = [threading.Thread(target=lambda t=t: went_on.append(ending.wait(t))) for t in (None, 60.0, None, 60.0)]
    for thread in waiting:
        thread.start()
    ending.set()
    ending.set()  # again
    for thread in waiting:
        thread.join(60.0)
    assert went_on == [True] * 4
    assert ending.is_set()
    assert ending.wait()
    assert ending.wait(0.0)
