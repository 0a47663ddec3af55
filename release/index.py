"""A package index on this machine, as pip asks one: a folder a project, shown over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename


@contextmanager
def served(archives: Iterable[Path], folder: Path) -> Iterator[str]:
    """Address of an index that holds these wheels and sdists, and nothing else; `folder` is made for it."""
    for archive in archives:
        name = (parse_wheel_filename if archive.suffix == ".whl" else parse_sdist_filename)(archive.name)[0]
        project = folder / canonicalize_name(name)
        project.mkdir(parents=True, exist_ok=True)
        project.joinpath(archive.name).symlink_to(archive)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Silent(SimpleHTTPRequestHandler):
    """Shows folders as pages of links, which is what an index is."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
