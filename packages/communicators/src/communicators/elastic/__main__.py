"""Meeting place of elastic ranks: `python -m communicators.elastic [--port 29400]`.

A small server that keeps a few texts. It runs apart from all ranks, so that none of them takes it along when it dies.
"""

import argparse
import os
import threading
from collections.abc import Sequence

from torch._C._distributed_c10d import TCPStore

from communicators.elastic.store import PORT


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m communicators.elastic", description=__doc__)
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0 takes a free one")
    asked = parser.parse_args(argv)
    # torch asks the DNS for the name of whoever connects, and serves nobody meanwhile: 5 s where no answer comes
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    try:
        store = TCPStore("0.0.0.0", asked.port, is_master=True, wait_for_workers=False)  # noqa: S104 - ranks of other machines meet there
    except RuntimeError as error:
        parser.error(f"port {asked.port} cannot be served, maybe another program does: {error}")
    print(f"elastic ranks meet at port {store.port}: Elastic('this host:{store.port}')", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
