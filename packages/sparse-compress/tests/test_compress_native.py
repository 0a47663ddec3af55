"""The compiled kernels against NumPy, at every level that runs here: the same bits, at any address, in any thread."""

import mmap
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparse_compress import ErrorFeedback, SparseVector, TopK, add, add_all, merge, share, topk
from sparse_compress.native import compiling, library
from sparse_compress.native.library import SWITCH, kernels, using
from sparse_compress.selection import LargestOfBlocks, Reaching
from sparse_compress.spread_keys import rising
from sparse_compress.vector import check_entries
from sparse_compress.vectors import larger, of_entries, without

seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(1, 300) | st.integers(1, 100_000)


def bits(tensor):
    return tensor.view(torch.int32)


def assert_same(one, other):
    """Of vectors or tensors."""
    one, other = ((x.pack() if isinstance(x, SparseVector) else bits(x)) for x in (one, other))
    assert torch.equal(one, other)


def both(level, call):
    """The results in NumPy and by the kernels."""
    with using("plain"):
        expected = call()
    with using(level):
        assert kernels() is not None
        return expected, call()


@pytest.mark.few(12)
@given(seed=seeds, n=lengths | st.integers(100_000, 300_000), data=st.data())
def test_selection(level, nasty, seed, n, data):
    x = torch.from_numpy(nasty(np.random.default_rng(seed), n))
    k = data.draw(st.sampled_from([1, 2, n // 1000, n // 100, n // 10, n // 2, n - 1, n]) | st.integers(0, n))
    assert_same(*both(level, lambda: topk(x, k)))
    key = int(bits(x)[seed % n]) & 0x7FFFFFFF
    assert_same(*both(level, lambda: Reaching(key, k)(x)))


@pytest.mark.few(6)
def test_no_temporary_of_the_inputs_size(level, nasty):
    """At most a byte an element at n = 6·10⁶, where keys would take four."""
    n = 6_000_000
    x = torch.from_numpy(nasty(np.random.default_rng(0), n))
    with using(level):
        tracemalloc.start()
        topk(x, n // 1000)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < n


def steps(gradients, *, select=None, **mode):
    """Sent, residuals and velocities of some steps."""
    feedback, seen = ErrorFeedback(TopK(0.02), **mode), []
    for gradient in gradients:
        sent = feedback.compress("w", gradient, select=select)
        feedback.commit()
        feedback.restore("w", topk(sent.to_dense(), 7))
        seen += [sent, *(part.clone() for part in feedback._known["w"].flat())]
    return seen


@pytest.mark.few(12)
@given(
    seed=seeds,
    n=lengths,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    momentum=st.sampled_from([0.0, 0.9]),
    tentative=st.booleans(),
    kind=st.sampled_from(["k", "key", "blocks"]),
)
def test_steps(level, nasty, seed, n, dtype, momentum, tentative, kind):
    rng = np.random.default_rng(seed)
    first, second = (torch.from_numpy(nasty(rng, n)) for _ in range(2))
    second[first.isnan()] = 0
    gradients = [x.nan_to_num(0).to(dtype) if dtype.itemsize == 2 else x for x in (first, second)]
    a, k = n // 3, max(n // 50, 1)
    blocks = LargestOfBlocks([(0, a), (a, a), (a, n)], [min(k, a), 0, min(k, n - a)])  # none is without a budget
    select = {"k": None, "key": Reaching(int(bits(first)[seed % n]) & 0x7FFFFFFF, k), "blocks": blocks}[kind]
    call = partial(steps, gradients, select=select, momentum=momentum, tentative=tentative)
    for one, other in zip(*both(level, call), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_sample_that_misleads(level, momentum):
    """Too few elements reach its threshold: what was found goes back, and nothing is accumulated twice."""
    x = torch.full((100_000,), 1e-3)
    sampled = x[:: len(x) // 1024 | 1]
    sampled.copy_(torch.arange(1, len(sampled) + 1))
    assert_same(*both(level, lambda: topk(x, 2000)))
    low = Reaching(int(bits(x)[1]), 2000)  # all reach it
    assert_same(*both(level, lambda: low(x)))
    for select in (None, low):
        for one, other in zip(*both(level, lambda s=select: steps([x, x], select=s, momentum=momentum)), strict=True):
            assert_same(one, other)


def entries(rng, nasty, numel, count):
    """A vector at random indices."""
    indices = np.sort(rng.permutation(numel)[:count]).astype(np.int32)
    values = nasty(rng, count) if count else np.empty(0, np.float32)
    return SparseVector(torch.from_numpy(indices), torch.from_numpy(values), numel)


@pytest.mark.few(12)
@given(seed=seeds, numel=lengths, data=st.data())
def test_sums(level, nasty, seed, numel, data):
    rng = np.random.default_rng(seed)
    a, b, c = (entries(rng, nasty, numel, data.draw(st.integers(0, numel) | st.just(numel // 2))) for _ in range(3))
    for other in (b, c):  # of two NaNs NumPy keeps the one or the other, depending on the place
        other.values[other.values.isnan()] = torch.inf
    k = data.draw(st.integers(0, numel))
    for one, other in zip(*both(level, lambda: merge(a, b, k)), strict=True):
        assert_same(one, other)
    assert_same(*both(level, lambda: add(a, b)))
    assert_same(*both(level, lambda: add_all([a, b, c])))


@pytest.mark.few(8)
@given(seed=seeds, numel=lengths, data=st.data())
def test_some_of_the_entries(level, nasty, seed, numel, data):
    rng = np.random.default_rng(seed)
    a, b = (entries(rng, nasty, numel, data.draw(st.integers(0, numel) | st.just(numel // 2))) for _ in range(2))
    assert_same(*both(level, lambda: without(a, b)))
    keys = bits(a.values) & 0x7FFFFFFF
    key = int(keys[seed % len(a)]) if len(a) else 0
    ties = data.draw(st.integers(0, 3) | st.just(numel))
    for bound in (0, key, -1):
        assert_same(*both(level, lambda bound=bound: larger(a, bound, ties)))
        expected, found = both(level, lambda bound=bound: rising(keys, max(bound, 0)))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", [[0, 0], [5, 4], [*range(40), 39], [7, -1]])
def test_indices_that_do_not_increase(level, wrong):
    with using(level):
        check_entries(of_entries(torch.arange(0, 999, 3, dtype=torch.int32), torch.ones(333), 1000), 0, 1000)
        sparse = of_entries(torch.tensor(wrong, dtype=torch.int32), torch.ones(len(wrong)), 1000)
        with pytest.raises(ValueError, match="not strictly increasing"):
            check_entries(sparse, 0, 1000)


@given(first=st.integers(0, 99), last=st.integers(0, 99), low=st.integers(-1, 100), high=st.integers(0, 101))
def test_indices_beyond_their_range(level, first, last, low, high):
    sparse = SparseVector(torch.tensor(sorted({first, last}), dtype=torch.int32), torch.ones(1 + (first != last)), 100)
    with using(level):
        if low <= min(first, last) and max(first, last) < high:
            check_entries(sparse, low, high)
        else:
            with pytest.raises(ValueError, match="indices run from"):
                check_entries(sparse, low, high)
        check_entries(SparseVector.empty(100), low, high)


@pytest.mark.few(12)
@given(seed=seeds, numel=lengths, of=st.integers(1, 9))
def test_a_share(level, nasty, seed, numel, of):
    cut = entries(np.random.default_rng(seed), nasty, numel, numel * 2 // 3)
    for member in range(of):
        assert_same(*both(level, lambda member=member: share(cut, member, of)))


@pytest.mark.parametrize("apart", [False, True])
def test_sums_of_many_entries(level, apart):
    """More than a sample of keys decides about; and vectors that do not overlap, so that streams end unevenly."""
    x = torch.randn(2, 400_000, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    if apart:
        x[0, :200_000], x[1, 200_000:] = 0, 0
    a, b = topk(x[0], 100_000), topk(x[1], 90_001)
    assert_same(*both(level, lambda: without(a, b)))
    for k in (1, 40_000, 100_000, 150_000, 190_000):
        for one, other in zip(*both(level, lambda k=k: merge(a, b, k)), strict=True):
            assert_same(one, other)


def test_of_two_nans_the_first_stays(level):
    with using(level):
        for first, second in ((1, 2), (2, 1)):
            a, b = (SparseVector(torch.tensor([3], dtype=torch.int32), torch.zeros(1), 4) for _ in range(2))
            bits(a.values)[0], bits(b.values)[0] = 0x7F800000 + first, 0x7FC00000 + second
            assert bits(add(a, b).values).item() == 0x7FC00000 + first


@pytest.mark.few(12)
@given(seed=seeds, numel=lengths, divisor=st.sampled_from([1.0, 2.0, 3.0]))
def test_putting_back(level, nasty, seed, numel, divisor):
    sparse = entries(np.random.default_rng(seed), nasty, numel, numel * 2 // 3)
    out = torch.full((numel + 1,), 7.0)
    assert_same(*both(level, lambda: sparse.put(out.clone()[1:], divisor=divisor)))
    assert_same(*both(level, sparse.to_dense))


@pytest.mark.few(12)
@given(
    seed=seeds,
    beyond=st.integers(0, 40),
    offset=st.integers(0, 17),
    entries_=st.integers(0, 60) | st.sampled_from([5000, 16_000]),
    together=st.booleans(),
    divisor=st.sampled_from([1.0, 3.0]),
)
def test_putting_back_in_windows(level, nasty, seed, beyond, offset, entries_, together, divisor):
    """The last window may not be whole, some have no entry, others nothing else."""
    numel, rng = (1 << 14) + beyond, np.random.default_rng(seed)
    indices = np.arange(entries_) if together else np.sort(rng.choice(numel, entries_, replace=False, shuffle=False))
    at = torch.from_numpy((indices if seed % 2 else numel - 1 - indices[::-1]).astype(np.int32))
    values = torch.from_numpy(nasty(rng, entries_) if entries_ else np.empty(0, np.float32))
    sparse = SparseVector(at, values, numel)
    assert_same(*both(level, lambda: sparse.put(torch.ones(numel + offset)[offset:], divisor=divisor)))


def test_what_is_put_elsewhere_is_refused():
    sparse = topk(torch.ones(6), 2)
    assert sparse.put(torch.ones(2, 3), divisor=2).tolist() == [[0.5, 0.5, 0], [0, 0, 0]]
    for out in (torch.ones(5), torch.ones(6, dtype=torch.float64), torch.ones(3, 2).T, torch.ones(6, device="meta")):
        with pytest.raises(ValueError, match="cannot be put into"):
            sparse.put(out)
    with pytest.raises(TypeError, match=r"out is ndarray, expected a tensor: torch.from_numpy"):
        sparse.put(np.zeros(6, np.float32))


def unaligned(x, offset):
    """The same elements at an address that is no multiple of 4."""
    memory = np.zeros(x.numel() * x.element_size() + offset, np.uint8)
    moved = torch.from_numpy(memory[offset:].view(np.float32))
    return moved.copy_(x)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_at_any_address(level, offset):
    for n in (1, 31, 10_007):
        x = unaligned(torch.randn(n, generator=torch.Generator().manual_seed(n)), offset)
        assert_same(*both(level, lambda x=x: topk(x, max(len(x) // 50, 1))))
        for one, other in zip(*both(level, partial(steps, [x, x], momentum=0.9)), strict=True):
            assert_same(one, other)
        with using(level):
            out = unaligned(torch.zeros(n), offset)
            assert_same(topk(x, 1).put(out), topk(x, 1).to_dense())


def test_what_is_read_is_not_written(level):
    """In memory that the system protects."""
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    with open("/dev/zero" if sys.platform != "linux" else os.memfd_create("input"), "r+b", buffering=0) as file:
        file.write(values.tobytes())
        memory = mmap.mmap(file.fileno(), values.nbytes, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that it is not to be written
        x = torch.from_numpy(np.frombuffer(memory, np.float32))
    assert_same(*both(level, lambda: topk(x, 500)))
    for one, other in zip(*both(level, partial(steps, [x, x], momentum=0.9, tentative=True)), strict=True):
        assert_same(one, other)


def test_in_several_threads_at_once(level):
    """Each has scratch memory of its own."""
    inputs = [torch.randn(200_000, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [merge(topk(x, 3000 + seed), topk(-x.flip(0), 2000), 2500) for seed, x in enumerate(inputs)]
    wrong = []

    def work(seed, x):
        for _ in range(20):
            found = merge(topk(x, 3000 + seed), topk(-x.flip(0), 2000), 2500)
            if any(not torch.equal(a.pack(), b.pack()) for a, b in zip(found, expected[seed], strict=True)):
                wrong.append(seed)

    with using(level):
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(inputs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A compiled file, and the reason why there is none."""
    target = tmp_path_factory.mktemp("native") / "kernels.so"
    reason = compiling.compile_kernels(target)
    if reason is not None:
        pytest.skip(f"nothing can be compiled here: {reason}")
    return target


def words(**environment):
    """What `python -m sparse_compress` tells, and the entries that a process then selects."""
    command = "import runpy, torch, sparse_compress as s; print(s.topk(torch.tensor([1., 3, 2]), 1).indices.item());"
    done = subprocess.run(
        [sys.executable, "-c", command + "runpy.run_module('sparse_compress', run_name='__main__')"],
        env={**os.environ, SWITCH: "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    first, line = done.stdout.strip().split("\n", 1)
    assert first == "1"
    return line


def test_a_process_tells_what_it_uses(compiled):
    assert words(**{SWITCH: str(compiled)}).endswith(f": {compiled}")


def test_why_an_environment_has_no_kernels(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    assert library._found.__wrapped__() == (None, f"NumPy: {SWITCH}=0 is set")
    monkeypatch.setenv(SWITCH, "fast")
    wrong = f"NumPy: {SWITCH}='fast' is neither 0, one of ['c', 'avx2', 'avx512'] nor a compiled file"
    with pytest.warns(RuntimeWarning, match=re.escape(wrong)):
        assert library._found.__wrapped__() == (None, wrong)


def test_the_compiled_file_names_no_library(compiled):
    """So that one wheel serves every C library, and is small."""
    content = compiled.read_bytes()
    assert len(content) < 200_000
    assert sys.platform != "linux" or (b"libc" not in content and b"GLIBC" not in content)


def test_a_file_of_another_source_is_not_used(compiled, tmp_path, monkeypatch):
    other = tmp_path / "kernels.c"
    other.write_text(compiling.SOURCE.read_text() + "\n")
    for module in (compiling, library):
        monkeypatch.setattr(module, "SOURCE", other)
    found = library._opened(compiled, "c")
    assert found.library is None
    assert found.words == "NumPy: kernels.so is of another kernels.c: install again"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_not_loaded(compiled, tmp_path, share):
    """The loader would map what is not there, and the process end by SIGBUS."""
    content, cut = compiled.read_bytes(), tmp_path / "kernels.so"
    cut.write_bytes(content[: int(share * len(content))])
    found = library._opened(cut, "c")
    assert found.library is None
    assert found.words == "NumPy: kernels.so is cut off: install again"


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("", (library.COMPILED, "avx512")),
        ("c", (library.COMPILED, "c")),
        ("avx2", (library.COMPILED, "avx2")),
        ("0", (None, "c")),
        ("other.so", (Path("other.so"), "avx512")),
    ],
)
def test_what_the_environment_chooses(setting, chosen, monkeypatch):
    monkeypatch.setenv(SWITCH, setting)
    assert library._setting() == chosen


def test_a_file_that_lacks_a_function_is_not_used(compiled, monkeypatch):
    monkeypatch.setitem(library.SIGNATURES, "sc_nowhere", (None, []))
    found = library._opened(compiled, "c")
    assert found.library is None
    assert found.words.startswith("NumPy: kernels.so cannot be loaded: ")
    assert "sc_nowhere" in found.words


def test_without_a_compiler_one_line_says_so(tmp_path, monkeypatch):
    target = tmp_path / "kernels.so"
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert compiling.compile_kernels(target) == "no C compiler was found"
    monkeypatch.setenv("CC", f"{sys.executable} -c 'raise SystemExit(\"no\\nfit\")'")
    assert compiling.compile_kernels(target) == f"{sys.executable} failed: fit"
    monkeypatch.setenv(SWITCH, "0")
    assert compiling.compile_kernels(target) == f"{SWITCH}=0 is set"
    assert list(tmp_path.iterdir()) == []
    assert library._opened(target, "c").words == "NumPy: installed without a compiled file"
