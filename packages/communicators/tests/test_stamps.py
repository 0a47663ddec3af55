"""The slot of a message."""

import threading

import numpy as np
import pytest
import torch
from communicators.background.call import Call
from communicators.schedule import SLOT_BYTES, Payload

pytestmark = pytest.mark.quick


def schedule():
    yield


def test_a_payload_that_is_sent_again_has_its_stamp_at_every_moment():
    """The last message with it may be under way still, and a transport reads it without Python's lock."""
    call = Call(schedule(), rank=1, size=3, facts="facts", number=5)
    payload = Payload.of(torch.zeros(8, dtype=torch.uint8))
    call.stamp(payload)
    words = payload.memory[:SLOT_BYTES].numpy().view(np.uint32)
    read_often = np.lib.stride_tricks.as_strided(words, (10**6, len(words)), (0, 4))
    stamped, differ = words.copy(), []

    def watch():
        differ.extend(np.not_equal(read_often, stamped).any() for _ in range(20))

    watching = threading.Thread(target=watch)
    watching.start()
    while watching.is_alive():
        call.stamp(payload)
    watching.join()
    assert differ == [False] * 20
