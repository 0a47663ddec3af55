"""The emulated slow link: never faster than it says, and nothing is left of it, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from communicators import Link, SimulatedWorld, allreduce
from hypothesis import given
from hypothesis import strategies as st
from slow_link import Launcher, Port, SlowLink, ThrottledLink, Unavailable, missing, open_link, sweep
from slow_link import launcher as launcher_module
from slow_link import link as slow_link_module
from slow_link.link import _ending_as_exceptions
from slow_link.namespaces import BURST_BYTES, _runs, open_tun
from slow_link.switch import HEADERS_BYTES, VNET_BYTES, Lines, Switch, receiver, wire_bytes
from slow_link.throttled import Throttled, behind_link

pytestmark = pytest.mark.quick

LACKING = missing()
emulated = pytest.mark.skipif(bool(LACKING), reason=f"no emulated link here: {'; '.join(LACKING)}")

PLAY = """
def play(rank, send, receive, nbytes):
    # the least of some ping-pongs one way, in seconds, by the clock of who serves
    import time
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for serving in (0, 1):
            send(nbytes) if rank == serving else receive(nbytes)
        times.append((time.perf_counter() - begin) / 2)
    if rank == 0:
        print(nbytes, min(times[1:]))
"""
OVER_SOCKETS = f"""{PLAY}
import os, socket, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 5000)
if rank == 0:
    server = socket.create_server(address)
    peer, _ = server.accept()
while rank:
    try:
        peer = socket.create_connection(address)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
for nbytes in (16, 1 << 17):
    play(rank, lambda n: peer.sendall(bytes(n)), lambda n: peer.recv(n, socket.MSG_WAITALL), nbytes)
"""
OVER_MPI = f"""{PLAY}
from mpi4py import MPI
comm = MPI.COMM_WORLD
peer = 1 - comm.rank
for nbytes in (16, 1 << 17):
    play(comm.rank, lambda n: comm.Send(bytes(n), peer), lambda n: comm.Recv(bytearray(n), peer), nbytes)
"""


TORCHRUN = ["--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def traces(pid=None):
    """Namespaces, devices and switches of a process (this one) that exist."""
    pid = os.getpid() if pid is None else pid
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    found = [line for line in namespaces.splitlines() if line.startswith(f"slowlink-{pid}-")]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else []:
        command = Path(f"/proc/{child}/cmdline").read_text()
        found += [command] if "switch.py" in command else []
    return found


def link(ranks=2):
    return SlowLink(ranks=ranks, mbit_per_second=100, milliseconds=1.0)


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def inside(net, rank):
    """Numbers of the processes in a rank's namespace."""
    words = ["ip", "netns", "pids", net.prefix(rank)[-1]]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def at_least_modelled(output, net):
    found = [line.split() for line in output.splitlines()]
    assert [int(nbytes) for nbytes, _ in found] == [16, 1 << 17]
    for nbytes, seconds in found:
        assert float(seconds) >= net.alpha + net.beta * int(nbytes)


@emulated
def test_nothing_is_left():
    with link(ranks=3):
        end = time.monotonic() + 5.0
        while len(traces()) < 4 and time.monotonic() < end:
            time.sleep(0.01)  # a process that has just begun has no command line yet
        assert len(traces()) == 4  # three namespaces and a switch
    assert traces() == []


@emulated
def test_nothing_is_left_after_an_exception_inside():
    strays = []

    def fail():
        with link() as net:
            strays.append(subprocess.Popen([*net.prefix(0), "sleep", "60"]))
            while not inside(net, 0):
                time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    [stray] = strays
    assert stray.wait(timeout=5) == -signal.SIGKILL
    assert traces() == []


@emulated
def test_nothing_is_left_when_it_cannot_be_made(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("by hand")

    monkeypatch.setattr(SlowLink, "_started_switch", broken)
    with pytest.raises(RuntimeError, match="by hand"), link():
        pass
    assert traces() == []


def heed_interrupts():
    """A shell's background jobs inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.few(2)
@emulated
@pytest.mark.parametrize(
    ("number", "status", "launch"),
    [
        (signal.SIGTERM, 143, ["--ranks", "2", "--"]),
        (signal.SIGKILL, -9, ["--ranks", "2", "--"]),
        (signal.SIGINT, 130, ["--ranks", "2", "--"]),
        (signal.SIGINT, 130, [*TORCHRUN, "--no-python"]),
        pytest.param(signal.SIGINT, 130, ["--", "mpiexec", "-n", "2"], marks=[pytest.mark.mpi, pytest.mark.mpich]),
    ],
)
def test_nothing_is_left_of_an_ended_run(number, status, launch, tmp_path):
    """A line tells of Ctrl-C; the ranks get SIGTERM. SIGKILL leaves something: it is what `sweep` is for."""
    (tmp_path / "rank.sh").write_text("trap 'touch $0.$$; exit 1' TERM; echo $$; while true; do sleep 60 & wait; done")
    words = [sys.executable, "-m", "slow_link", *launch, "sh", str(tmp_path / "rank.sh")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, preexec_fn=heed_interrupts, **pipes) as run:
        ranks = [int(run.stdout.readline()) for _ in range(2)]
        assert all(map(alive, ranks))
        run.send_signal(number)
        assert run.wait(timeout=20) == status
        if number == signal.SIGINT:
            said = [line for line in run.stderr.read().splitlines() if "[c10d]" not in line]
            assert (said[1:], run.stdout.read()) == (["slow_link: interrupted"], "")
    left = traces(run.pid)
    terminated = {file.name for file in tmp_path.glob("rank.sh.*")}
    assert terminated == (set() if number == signal.SIGKILL else {f"rank.sh.{pid}" for pid in ranks})
    if number == signal.SIGKILL:
        assert len(left) == 2
        assert {name.split()[0] for name in left} <= set(sweep())
    assert traces(run.pid) == []
    assert not any(map(alive, ranks))


@emulated
def test_a_killed_run_that_nobody_waits_for_is_swept():
    """It stays a zombie, as under a container's first process that reaps none."""
    words = [sys.executable, "-m", "slow_link", "--ranks", "1", "--", "sh", "-c", "echo up; exec sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "up\n"
        os.kill(run.pid, signal.SIGKILL)
        os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
        sweep()  # or another test did, at the same time
        assert traces(run.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_of_any_name_runs():
    """Names are bytes, and the number of a killed run may be another program's by now."""
    program = r"import time; open('/proc/self/comm', 'wb').write(b'\xff) Z'); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        try:
            assert _runs(process.pid)
        finally:
            process.kill()
        process.wait()
        assert not _runs(process.pid)


@emulated
def test_timeout_ends_the_ranks():
    with link() as net:
        with pytest.raises(subprocess.TimeoutExpired) as raised:
            net.processes(["sh", "-c", "echo here; exec sleep 60"], timeout=0.5)
        assert "here" in raised.value.output
        assert inside(net, 0) == inside(net, 1) == []


def test_ranks_that_are_ended_have_time_to_end_by_themselves():
    words = "trap 'sleep 0.1; echo here ended; exit' TERM; echo here; while true; do sleep 0.01; done"
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        Launcher(ranks=2).processes(["sh", "-c", words], timeout=0.3)
    said = raised.value.output.split()
    assert said.count("here") == 2 * said.count("ended")


@pytest.mark.parametrize(
    ("seconds", "does", "status"), [(10.0, "sleep 0.1; exit 3", 3), (0.1, "exec sleep 60", -signal.SIGTERM)]
)
def test_once_a_rank_has_failed_the_others_have_a_while_to_end(seconds, does, status, monkeypatch):
    monkeypatch.setattr(launcher_module, "FAILURE_SECONDS", seconds)
    done = Launcher(ranks=2).processes(["sh", "-c", f"[ $RANK = 0 ] && exit 1; {does}"], timeout=60)
    assert [one.returncode for one in done] == [1, status]


IP_MAKES_ONE = """ip netns add $0 || exit 1
ip -n $0 tuntap add mode tun name e0
made=$?
ip netns delete $0
exit $made"""


def test_a_device_can_be_made_where_ip_makes_one():
    """Or each test of an emulated link would be left out."""
    if subprocess.run(["sh", "-c", IP_MAKES_ONE, f"try-{os.getpid()}"], capture_output=True).returncode:
        pytest.skip("ip makes none here")
    device, name = open_tun()
    os.close(device)
    assert name.startswith("slowlink")


@emulated
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_segments_pass_the_burst_whole_and_are_single_packets_where_some_are_lost(loss):
    with SlowLink(ranks=1, ports=[Port(loss=loss)]) as net:
        words = [*net.prefix(0), "ip", "-json", "-details", "link", "show", net.device]
        [device] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert device["mtu"] == 1500
    assert device["gso_max_segs"] == 1 if loss else device["gso_max_size"] <= BURST_BYTES


@pytest.mark.slow
@emulated
@pytest.mark.parametrize(
    ("ports", "nbytes"),
    [
        ([Port()] * 2, 1 << 22),
        ([Port(up=500, down=500, delay=80)] * 2, 40_000_000),
        ([Port(up=500, down=100, delay=20), Port(up=10, down=200, delay=60)], 8_000_000),
        ([Port(up=1e6, down=1e6, delay=1e5)] * 2, 1 << 30),
        ([Port()], 1 << 22),
    ],
)
def test_tcp_may_have_four_times_as_much_under_way_as_fills_the_longest_path(ports, nbytes):
    with SlowLink(ranks=len(ports), ports=ports) as net:
        assert net.buffer == nbytes
        for done in net.processes(["cat", *(f"/proc/sys/net/ipv4/tcp_{way}mem" for way in "rw")], timeout=20):
            assert [int(line.split()[2]) for line in done.stdout.splitlines()] == [nbytes] * 2


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((SlowLink, {"flip_every": n}) for n in (-1, 1.5, True)),
        *((ThrottledLink, {"mbit_per_second": rate}) for rate in (0, float("nan"))),
        *((ThrottledLink, {"milliseconds": late}) for late in (-1, float("nan"), float("inf"))),
    ],
)
def test_a_link_of_no_number_is_refused(kind, wrong):
    with pytest.raises(ValueError, match="expected"):
        kind(ranks=2, **wrong)


def test_a_rank_is_alone_on_its_machine():
    """Scripts for torchrun read LOCAL_RANK."""
    words = ["sh", "-c", "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"]
    done = Launcher(ranks=2).processes(words, timeout=30)
    assert [one.stdout for one in done] == ["0 of 2, 0 of 1\n", "1 of 2, 0 of 1\n"]


def test_a_link_is_entered_before_ranks_are_started():
    net = link()
    for early in (lambda: net.processes(["true"], timeout=5), lambda: net.darken(0)):
        with pytest.raises(RuntimeError, match="enter it by `with`"):
            early()


def test_nccl_is_kept_on_the_link_unless_the_user_says_otherwise(monkeypatch):
    for name in slow_link_module.NCCL:
        monkeypatch.delenv(name, raising=False)
    assert link().environment().items() >= {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "e0"}.items()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")  # which the namespace does not have
    assert link().environment().items() >= {"NCCL_P2P_DISABLE": "0", "NCCL_SOCKET_IFNAME": "e0"}.items()
    assert not any(name.startswith("NCCL") for name in Launcher(ranks=2).environment())


@emulated
def test_ping_pong_takes_the_modelled_time():
    with link() as net:
        first, second = net.processes([sys.executable, "-c", OVER_SOCKETS], timeout=30)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    at_least_modelled(first.stdout, net)


@pytest.mark.slow
@emulated
@pytest.mark.mpi
@pytest.mark.mpich
def test_ping_pong_by_mpi_takes_the_modelled_time():
    with link() as net:
        done = net.mpiexec([sys.executable, "-c", OVER_MPI], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    at_least_modelled(done.stdout, net)


def packet(nbytes, to, *, segment=0):
    """An IPv4 TCP packet of `nbytes` for rank `to`, to be cut into segments of so many bytes."""
    data = bytearray(VNET_BYTES + nbytes)
    data[4:6] = segment.to_bytes(2, sys.byteorder)
    data[VNET_BYTES], data[VNET_BYTES + 19], data[VNET_BYTES + 32] = 0x45, to + 1, 8 << 4
    return bytes(data)


def lines(ports):
    """What joins ranks with these ports, as the switch has it."""
    return Lines(**SlowLink(ranks=len(ports), ports=ports)._lines())


def arrivals(switch, sent):
    """(receiver, bytes, seconds) of each packet that arrives, of those (source, target, bytes, now)."""
    for source, target, nbytes, now in sent:
        switch.take(source, packet(nbytes, target), now)
    found = []
    while switch._travelling:
        if arrived := switch.next_arrived():
            when, target, data = arrived
            found.append((target, wire_bytes(data), when))
    return found


KB_PER_SECOND = 8e-3  # Mbit/s


def test_switch_serialises_senders_and_receivers():
    switch = Switch([10, 11, 12], lines([Port(up=KB_PER_SECOND, down=KB_PER_SECOND, delay=1000)] * 3))
    sent = [(0, 2, 100, 0.0), (0, 2, 101, 0.0), (1, 2, 102, 0.0), (0, 1, 103, 0.0), (2, 9, 104, 0.0)]
    # 0 -> 2 leave at 0.1 and 0.201; 1 -> 2 leaves at 0.102 and waits for 2's port; 0 -> 1 is 0's third
    expected = [(2, 100, 1.1), (2, 102, 1.202), (2, 101, 1.303), (1, 103, 1.304)]
    assert arrivals(switch, sent) == [(*what, pytest.approx(when)) for *what, when in expected]


def test_switch_sends_by_the_senders_rate_and_receives_by_the_receivers():
    slow, fast = KB_PER_SECOND, 10 * KB_PER_SECOND
    unequal = [Port(up=slow, down=fast, delay=1000), Port(up=fast, down=slow, delay=3000)]
    # 100 bytes: 0.1 s at the slow rate, 0.01 at the fast one; the delay between the two is the mean of theirs
    assert arrivals(Switch([10, 11], lines(unequal)), [(0, 1, 100, 0.0)]) == [(1, 100, pytest.approx(2.1))]
    unequal = [Port(up=fast, down=fast, delay=1000), Port(up=slow, down=slow, delay=3000)]
    to_the_slow, _ = arrivals(Switch([10, 11], lines(unequal)), [(0, 1, 100, 0.0), (0, 1, 100, 0.0)])
    assert to_the_slow == (1, 100, pytest.approx(2.1))  # its last bit cannot be there before


def test_switch_takes_nearer_packets_first_whoever_was_taken_first():
    switch = Switch([1, 2, 3], lines([Port(delay=100), Port(delay=1), Port(delay=1)]))
    assert [nbytes for _, nbytes, _ in arrivals(switch, [(0, 2, 60, 0.0), (1, 2, 61, 0.0)])] == [61, 60]


@given(st.integers(0, 2**20), st.floats(0, 50), st.integers(1, 50))
def test_switch_keeps_packets_of_a_pair_in_order_within_their_jitter(seed, jitter, count):
    switch = Switch([1, 2], lines([Port(delay=50, jitter=jitter)] * 2), seed=seed)
    found = arrivals(switch, [(0, 1, 60 + number, 1e-4 * number) for number in range(count)])
    assert [nbytes for _, nbytes, _ in found] == [60 + number for number in range(count)]
    for number, (_, _, when) in enumerate(found):
        left = 1e-4 * number
        assert left + (50 - jitter) * 1e-3 <= when <= left + (50 + jitter) * 1e-3 + count * 2e-5 + count * 1e-4


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3])
def test_switch_loses_the_share_of_packets_that_it_is_told(share):
    switch = Switch([1, 2], lines([Port(loss=share)] * 2))
    lost = 10_000 - len(arrivals(switch, [(0, 1, 60, 0.0)] * 10_000))
    assert lost == pytest.approx(10_000 * share, abs=4 * (10_000 * share * (1 - share)) ** 0.5)


def test_switch_charges_headers_of_every_segment():
    assert wire_bytes(packet(1500, 0)) == 1500
    assert wire_bytes(packet(52 + 3 * 1448, 0, segment=1448)) == 3 * 1500
    assert wire_bytes(packet(52 + 2 * 1448 + 1, 0, segment=1448)) == 2 * 1500 + 53
    assert receiver(packet(60, 5)) == 5
    assert receiver(bytes([0] * VNET_BYTES + [0x60] * 40)) == -1


def test_throttled_rounds_take_the_modelled_time():
    slow = Link(alpha=5e-3, beta=1e-6)
    x = [torch.arange(1000.0), torch.ones(1000)]
    begin = time.monotonic()
    totals = SimulatedWorld(2).run(lambda comm: allreduce(x[comm.rank], Throttled(comm, slow)))
    assert all(torch.equal(total, x[0] + x[1]) for total in totals)
    assert time.monotonic() - begin >= slow.seconds(4000, messages=1)


def test_throttled_ranks_are_those_of_the_communicator():
    """Its timeout, its duplicates, which are as slow, and its signals, which are not."""

    def body(comm):
        slow = Throttled(comm, Link(alpha=5e-3, beta=0.0))
        slow.timeout = 7.0
        again = slow.duplicate()
        begin = time.monotonic()
        total = allreduce(torch.ones(3), again)
        assert time.monotonic() - begin >= 5e-3
        signals = slow.signals()
        signals.send(comm.rank, 5)
        assert signals.poll() == [(comm.rank, 5)]
        signals.close()
        again.close()
        return comm.timeout, slow.timeout, total.tolist()

    assert SimulatedWorld(2).run(body) == [(7.0, 7.0, [2.0] * 3)] * 2


def test_throttled_link_says_so(monkeypatch, capsys):
    monkeypatch.setattr(slow_link_module, "missing", lambda: ["network namespaces need root"])
    with open_link(ranks=1, mbit_per_second=100, milliseconds=1.0) as net:
        assert isinstance(net, ThrottledLink)
        [done] = net.processes([sys.executable, "-c", "import os; print(os.environ['SLOW_LINK_THROTTLE'])"], timeout=30)
    assert done.stdout.strip() == "0.001,8e-08"
    said = capsys.readouterr().out
    assert "missing: network namespaces need root" in said
    assert "NOT an emulated link" in said
    with pytest.raises(Unavailable, match="need root"), link():
        pass
    monkeypatch.setenv("SLOW_LINK_THROTTLE", done.stdout)
    assert isinstance(behind_link(), Throttled)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_that_end_a_process_are_exceptions_in_the_main_thread_alone(number):
    with pytest.raises(SystemExit, match=str(128 + number)), _ending_as_exceptions():
        os.kill(os.getpid(), number if signal.getsignal(number) is not signal.SIG_DFL else 0)
    assert signal.getsignal(number) is signal.SIG_DFL

    def inside():
        with _ending_as_exceptions():
            return signal.getsignal(number)

    with ThreadPoolExecutor(1) as other:
        assert other.submit(inside).result() is signal.SIG_DFL


def test_of_large_packets_every_nth_has_one_bit_flipped_behind_its_headers():
    switch, packets = Switch([1, 2], lines([Port()] * 2), flip_every=3), [bytes(999)]
    packets += [bytes([n % 2 * 255]) * (1000 + n) for n in range(20)]
    pairs = [zip(packet, switch._corrupted(packet), strict=True) for packet in packets]
    flipped = [[(at, was ^ byte) for at, (was, byte) in enumerate(pair) if was != byte] for pair in pairs]
    assert [len(places) for places in flipped] == [0] + [n % 3 == 2 for n in range(20)]
    places = [place for found in flipped for place in found]
    assert all(at >= HEADERS_BYTES and byte.bit_count() == 1 for at, byte in places)
    assert len({at for at, _ in places}) == len({byte for _, byte in places}) == len(places)
