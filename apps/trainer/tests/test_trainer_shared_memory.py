"""Only what a launch of ours has left behind is deleted."""

import mmap
import os
import time

from thinwire_trainer.launching.workers import remove_left_behind


def test_what_nobody_has_mapped_goes(tmp_path):
    names = ["mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_3_0", "sem.other"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
    os.utime(tmp_path / names[1], (0, 0))  # of an earlier job
    with (tmp_path / names[2]).open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert remove_left_behind(time.time(), tmp_path) == [tmp_path / names[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
