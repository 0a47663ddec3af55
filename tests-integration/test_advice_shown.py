"""docs/advise.md shows what the command prints, with the costs that are on record."""

import json
import re

import pytest
from thinwire.advice.command import main

from bench.advise import LEFT_OUT, advised
from bench.record import RESULTS, ROOT

SHOWN = re.findall(
    r"^\$ thinwire advise (.*)\n((?:(?!```|\$ ).*\n)+)",
    (ROOT / "docs" / "advise.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.few(2)
@pytest.mark.parametrize(("flags", "shown"), SHOWN, ids=[flags for flags, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(flags, shown, monkeypatch, capsys):
    recorded = advised(json.loads((RESULTS / "advise.json").read_text())["rows"], "wan")
    handling = recorded.handling
    place = "thinwire.advice.measuring"
    monkeypatch.setattr("sparse_collectives.prediction.measure_handling", lambda comm, density, **_: handling[density])
    monkeypatch.setattr(f"{place}.measure_work", lambda shapes, device: recorded.work)
    monkeypatch.setattr(f"{place}.measure_around", lambda shapes, device, **_: handling[0.01].compress)
    monkeypatch.setattr(f"{place}.share_taken", lambda comm: 0.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(flags.split()) == 0
    printed, words = capsys.readouterr().out.split(), shown.split()
    assert words == printed if words[0] != LEFT_OUT else words[1:] == printed[1 - len(words) :]


def test_several_networks_are_shown():
    assert len(SHOWN) == 3
