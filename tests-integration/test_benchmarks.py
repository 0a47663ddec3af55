"""What `python -m bench` promises of every benchmark that it names."""

from pkgutil import resolve_name

import pytest

from bench.__main__ import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_takes_full(name, capsys):
    with pytest.raises(SystemExit) as left:
        resolve_name(BENCHMARKS[name])(["--full", "--help"])
    assert left.value.code == 0
    assert "--full " in capsys.readouterr().out
