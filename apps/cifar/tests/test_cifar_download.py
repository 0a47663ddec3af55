"""--download, from a server of this machine's own: checked, unpacked as a whole, once; and without a network."""

import hashlib
import importlib.util
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import small_files
from thinwire_cifar.data import cifar10, mnist, published
from thinwire_cifar.data.published import Remote, fetch
from thinwire_trainer.data import one_at_a_time
from thinwire_trainer.errors import RunError

needs_pooch = pytest.mark.skipif(importlib.util.find_spec("pooch") is None, reason="pooch is not installed")


class Quiet(SimpleHTTPRequestHandler):
    """Counts what it serves."""

    served: list[str] = []  # noqa: RUF012 - of the class, as the server makes an object a request

    def log_message(self, *arguments: Any) -> None:
        self.served.append(self.path)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the address under which it is served."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    Quiet.served.clear()
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def md5(path: Path) -> str:
    return f"md5:{hashlib.md5(path.read_bytes()).hexdigest()}"


@pytest.fixture
def archive(site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """CIFAR-10 in small, packed as it is published."""
    folder, address = site
    small_files.cifar10_binary(tmp_path / "made")
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "made" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    remote = Remote(url=f"{address}cifar-10-binary.tar.gz", checksum=md5(folder / "cifar-10-binary.tar.gz"))
    versions = (replace(cifar10.LAYOUTS[0], archive=remote), cifar10.LAYOUTS[1])
    monkeypatch.setattr(cifar10, "load", replace(cifar10.CIFAR10, versions=versions).load)
    return remote


@needs_pooch
def test_an_archive_is_fetched_and_unpacked_once(archive: Remote, tmp_path: Path) -> None:
    for _ in range(2):
        assert len(cifar10.load(tmp_path / "data", download=True).train.labels) == 30
    assert Quiet.served == ["/cifar-10-binary.tar.gz"]
    left = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert left == [".lock", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"]


@needs_pooch
def test_what_was_put_there_by_hand_is_unpacked_without_a_network(
    archive: Remote, site: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (site[0] / archive.name).rename(tmp_path / "data" / archive.name)
    assert len(cifar10.load(tmp_path / "data", download=True).train.labels) == 30
    assert Quiet.served == []


@needs_pooch
def test_another_checksum(archive: Remote, site: tuple[Path, str], tmp_path: Path) -> None:
    (site[0] / archive.name).write_bytes(b"something else")
    with pytest.raises(RunError) as error:
        cifar10.load(tmp_path / "data", download=True)
    for part in (archive.url, "put it at", str(tmp_path / "data" / archive.name), archive.checksum[4:], "again"):
        assert part in str(error.value)
    assert not (tmp_path / "data" / "cifar-10-batches-bin").exists()


@needs_pooch
def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_listens = replace(mnist.MNIST, source="http://127.0.0.1:9/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(RunError) as error:
        nobody_listens.load(tmp_path, download=True)
    for part in ("cannot fetch http://127.0.0.1:9/train-images-idx3-ubyte.gz", "put it at", "f68b3c2dcbeaaa9fbdd348b"):
        assert part in str(error.value)


@needs_pooch
def test_only_the_files_that_are_missing(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    small_files.mnist_compressed(folder)
    small_files.mnist(tmp_path / "data")
    (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
    files = {
        split: (records, [(name, raw, md5(folder / f"{name}.gz")[4:]) for name, raw, _ in names])
        for split, (records, names) in mnist.FILES.items()
    }
    small = replace(mnist.MNIST, source=address, files=files)
    assert len(small.load(tmp_path / "data", download=True).train.labels) == 6
    assert Quiet.served == ["/t10k-labels-idx1-ubyte.gz"]


@needs_pooch
def test_an_archive_with_files_elsewhere(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    with tarfile.open(folder / "x.tar", "w") as packed:
        packed.add(Path(__file__), "../outside")
    with pytest.raises(RunError, match="cannot unpack"):
        fetch(Remote(url=f"{address}x.tar", checksum=md5(folder / "x.tar")), tmp_path / "data", unpacked="x")
    assert not (tmp_path / "outside").exists()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["x.tar"]


def test_without_pooch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"--download needs the pooch package: pip install pooch, or fetch it elsewhere"):
        cifar10.load(tmp_path, download=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    inside, most = [], []

    def take() -> None:
        with one_at_a_time(tmp_path):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.01)
            inside.pop()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
