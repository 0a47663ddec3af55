"""What earlier releases saved is loaded, and trainings go on to the bits that they would have come to then."""

from __future__ import annotations

import zipfile

import pytest
import torch
import torch.distributed as dist
from legacy_states import CASES, FOLDER, RUNS, STEPS, STORED, continued, trained

ARCHIVES = sorted(FOLDER.glob("*.zip"))
SAVED = [(path, name) for path in ARCHIVES for name in CASES if f"{name}-end.pt" in zipfile.ZipFile(path).namelist()]

pytestmark = pytest.mark.filterwarnings("ignore:two momenta multiply", "ignore:the gradients of this step were made")


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("path", "name"), SAVED, ids=lambda part: getattr(part, "stem", part))
def test_a_training_goes_on_from_what_an_earlier_release_saved(path, name, tmp_path):
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    end = torch.load(tmp_path / f"{name}-end.pt", weights_only=True)
    if name in RUNS:
        trained(name, tmp_path / name, steps=STEPS - STORED, resume=True)
        found = [torch.load(tmp_path / name / "model.pt", weights_only=True)]
        end = [end]
    else:
        found = [state["model"] for state in continued(name, torch.load(tmp_path / f"{name}.pt", weights_only=True))]
    for model, expected in zip(found, end, strict=True):
        assert model.keys() == expected.keys()
        assert all(expected[key].any() and torch.equal(model[key], expected[key]) for key in expected)
