"""Unequal ports: what is understood, what lies between two ranks, and that nobody is faster than his port."""

import subprocess
import sys

import pytest
import torch
from communicators import SimulatedWorld, allreduce
from hypothesis import given
from hypothesis import strategies as st
from slow_link import Port, SlowLink, missing, ports_of
from slow_link.ports import PRESETS, between, lines_of
from slow_link.simulated import paths_of

pytestmark = pytest.mark.quick

LACKING = missing()
emulated = pytest.mark.skipif(bool(LACKING), reason=f"no emulated link here: {'; '.join(LACKING)}")
USUAL = Port(up=100, down=100, delay=1)

ONE_WAY = """
import os, socket, sys, time
rank, address, nbytes = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 5000), int(sys.argv[1])
if rank == 0:
    peer, _ = socket.create_server(address).accept()
while rank:
    try:
        peer = socket.create_connection(address)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
for sender in (0, 1):
    begin = time.perf_counter()
    if rank == sender:
        peer.sendall(bytes(nbytes))
        peer.recv(1)
        print(time.perf_counter() - begin)
    else:
        left = nbytes
        while left:
            left -= len(peer.recv(left))
        peer.sendall(b"k")
"""


def test_settings_change_what_is_named_and_a_preset_begins_anew():
    ports = ports_of(["1,3: up=5mbit, delay=30ms, jitter=5ms, loss=0.1%", "2-3:home", "3:up=2mbit"], 4, USUAL)
    assert ports[0] == USUAL
    assert ports[1] == Port(up=5, down=100, delay=30, jitter=5, loss=0.001)
    assert ports[2] == PRESETS["home"]
    assert ports[3].up == 2
    assert ports[3].down == PRESETS["home"].down
    assert ports_of(["all:mobile"], 3, USUAL) == [PRESETS["mobile"]] * 3


def test_ranks_of_two_regions_are_near_within_theirs_and_far_from_the_others():
    ports = ports_of(["all:two-regions"], 4, USUAL)
    near, far = PRESETS["two-regions"].delay * 1e-3, (PRESETS["two-regions"].delay + PRESETS["two-regions"].far) * 1e-3
    delays = [[between(ports, source, target)[0] for target in range(4)] for source in range(4)]
    assert delays == [[near, near, far, far]] * 2 + [[far, far, near, near]] * 2


WRONG = [
    ("3:up=5mbit", "ranks are 0 to 1, got '3'"),
    ("up=5mbit", "expected RANKS:SETTINGS"),
    ("x:up=5mbit", "expected ranks such as 3, 0-2 or all, got 'x'"),
    ("1-0:home", "ranks are 0 to 1"),
    ("0:", "got ''; settings are up, down, delay, jitter, loss, far, region; presets: datacentre, home"),
    ("0:work", "got 'work'"),
    ("0:up=5", "expected a rate such as 100mbit or 1gbit"),
    ("0:up=0mbit", "expected rates from 0.001 to 1e+06 Mbit/s"),
    ("0:loss=0.1", "expected a share such as 0.1%"),
    ("0:loss=100%", "a loss from 0 % to below 100 %"),
    ("0:jitter=2ms", "a jitter from 0 to the delay"),
    ("0:up=0.0001kbit", "expected rates from"),
    ("0:delay=200s", "delays from 0 to 100 s"),
    ("0:speed=5mbit", "got 'speed=5mbit'"),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_line_is_told_with_what_is_expected(line, said, tmp_path):
    with pytest.raises(ValueError, match="as in 3:up=5mbit") as error:
        ports_of([line], 2, USUAL)
    assert said in str(error.value)
    file = tmp_path / "ports"
    file.write_text(f"1: home  # mine\n\n{line}\n")
    words = [sys.executable, "-m", "slow_link", "--ports", str(file), "--ranks", "2", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
    assert said in done.stderr


def test_settings_of_a_line_have_no_order():
    assert ports_of(["0:jitter=5ms,delay=30ms"], 1, USUAL) == ports_of(["0:delay=30ms,jitter=5ms"], 1, USUAL)


@pytest.mark.parametrize("line", ["all:far=40ms", "0:region=a"])
def test_regions_without_a_delay_between_them_and_that_without_regions_are_refused(line):
    with pytest.raises(ValueError, match="one without the other has no effect"):
        ports_of([line], 4, USUAL)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["up", "down", "delay", "jitter", "loss", "far"])
def test_a_port_of_no_number_is_refused(name, wrong):
    with pytest.raises(ValueError, match="expected rates from"):
        Port(**{name: wrong})


def test_a_link_says_what_it_is():
    usual = SlowLink(ranks=2).describe()
    assert "full duplex ports of 100 Mbit/s (IP packets of 1,500 bytes), 1 ms one way" in usual
    home = SlowLink(ranks=2, ports=ports_of(["all:home"], 2, USUAL), congestion="reno").describe()
    assert "0: up 25 Mbit/s, down 250 Mbit/s, 15 ms, jitter 3 ms, loss 0.0001" in home
    assert SlowLink(ranks=2, ports=[Port(delay=1), Port(delay=39)]).alpha == pytest.approx(0.02)


def test_a_file_of_ports_that_is_not_there_is_one_line(tmp_path):
    words = [sys.executable, "-m", "slow_link", "--ports", str(tmp_path / "none"), "--ranks", "2", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "No such file" in done.stderr


def test_comments_and_empty_lines_of_a_file_are_none(tmp_path):
    file = tmp_path / "ports"
    file.write_text("# ours\n0: home  # the first\n\n  1-2: up=5mbit\n")
    assert lines_of(file) == ["0: home", "1-2: up=5mbit"]


def test_every_rank_has_a_port():
    with pytest.raises(ValueError, match="one port for each of 3 ranks, got 2"):
        SlowLink(ranks=3, ports=[USUAL] * 2)


amounts = st.floats(1, 1000)
drawn_ports = st.builds(Port, up=amounts, down=amounts, delay=st.floats(0, 100), loss=st.floats(0, 0.01))


@given(st.lists(drawn_ports, min_size=2, max_size=5), st.integers(1, 200))
def test_a_simulated_world_takes_the_same_ports(ports, numel):
    """Its sums are those of equal links; no message is faster than the slower of the two rates and their delay."""
    size = len(ports)
    paths = paths_of(ports)
    for source in range(size):
        for target in range(size):
            delay, _, loss = between(ports, source, target)
            slowest = 8e-6 / min(ports[source].up, ports[target].down)
            assert paths(source, target).seconds(1000) >= delay + 1000 * slowest
            if not loss:
                path, headers = paths(source, target), 1500 / 1448
                rates = 8e-6 / ports[source].up * headers, 8e-6 / ports[target].down * headers
                assert (path.alpha, path.up, path.down) == pytest.approx((delay, *rates))

    def sums(link):
        world = SimulatedWorld(size, link)
        return [t.tolist() for t in world.run(lambda c: allreduce(torch.full((numel,), 1.0 + c.rank), c, native=False))]

    assert sums(paths) == sums(None)


def test_a_path_that_loses_packets_is_slower_the_more_and_the_longer_it_is():
    def seconds(**port):
        return paths_of([Port(**port)] * 2)(0, 1).seconds(10**6)

    usual = {"up": 100, "down": 100, "delay": 100}
    assert seconds(**usual) < seconds(**usual, loss=1e-4) < seconds(**usual, loss=1e-3)
    # Mathis: 1,448 bytes in 200 ms, √(3/2p) packets at once
    expected = 0.1 + 10**6 / (1448 * (1.5 / 1e-3) ** 0.5 / 0.2)
    assert seconds(**usual, loss=1e-3) == pytest.approx(expected)


def test_a_handshake_is_a_delay_more():
    ports = [Port(delay=10), Port(delay=30)]
    assert paths_of(ports)(0, 1).alpha == pytest.approx(0.02)
    assert paths_of(ports, handshake=True)(0, 1).alpha == pytest.approx(0.04)


@emulated
def test_what_a_rank_sends_and_receives_is_never_faster_than_its_port():
    """250 kB between ranks of which one has 5 Mbit/s up and 50 down, each way by the slower of the two."""
    ports = ports_of(["1: up=5mbit, down=50mbit, delay=20ms"], 2, USUAL)
    with SlowLink(ranks=2, ports=ports) as net:
        assert "1: up 5 Mbit/s, down 50 Mbit/s, 20 ms" in net.describe()
        there, back = net.processes([sys.executable, "-c", ONE_WAY, "250000"], timeout=60)
    assert there.returncode == back.returncode == 0, there.stderr + back.stderr
    rtt = (1 + 20) * 1e-3
    assert float(there.stdout) >= 250_000 * 8 / 50e6 + rtt
    assert float(back.stdout) >= 250_000 * 8 / 5e6 + rtt
    assert float(back.stdout) > 2 * float(there.stdout)


def test_a_congestion_control_that_the_kernel_has_not_is_one_line():
    with pytest.raises(ValueError, match=r"congestion control 'none' is not loaded here, but .*reno"):
        SlowLink(ranks=2, congestion="none")
    words = [sys.executable, "-m", "slow_link", "--congestion", "none", "--ranks", "2", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@emulated
def test_lost_packets_are_sent_again_and_nothing_of_the_data_is_lost():
    with SlowLink(ranks=2, ports=[Port(delay=5, loss=0.02)] * 2) as net:
        done = net.processes([sys.executable, "-c", ONE_WAY, "300000"], timeout=60)
    assert [one.returncode for one in done] == [0, 0], done
