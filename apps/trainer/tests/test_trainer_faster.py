"""--amp, --compile, --device, --keep: what they change, and what not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.launching.device import own_device
from thinwire_trainer.records.run_folder import RunFolder


def test_amp_casts_the_forward_of_training_alone(app: App, options: Callable[..., Options]) -> None:
    seen = []

    def build(given: Options, device: torch.device) -> Any:
        task = app.build(given, device)
        linear = next(part for part in task.model.modules() if isinstance(part, torch.nn.Linear))
        linear.register_forward_hook(lambda module, given, out: seen.append((module.training, out.dtype)))
        return task

    given = options(amp=True, momentum=0.9)
    train(replace(app, build=build), given, 1)
    assert set(seen) == {(True, torch.bfloat16), (False, torch.float32)}
    _, model, [state] = result(given)
    floating = [tensor for tensor in model.values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floating} == {torch.float32}
    momenta = [value["momentum_buffer"].dtype for value in state["optimizer"]["state"].values()]
    assert set(momenta) == {torch.float32}


def test_amp_is_resumed_with_the_same_bits_and_not_without_it(
    app: App, options: Callable[..., Options], tmp_path: Path
) -> None:
    straight = options(algorithm="gtopk", amp=True, output=tmp_path / "straight")
    train(app, straight, 2)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    assert killed_after(20, app, broken, 2)
    with pytest.raises(AgreedError, match="--amp True then, False now"):
        train(app, replace(broken, amp=False, resume="latest"), 2)
    train(app, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))


def test_what_is_compiled_is_the_forward_and_its_state_has_the_same_names(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a stand-in: the real one takes a minute for so small a model."""
    compiled = []

    def stand_in(forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(forward)
        return lambda *given: forward(*given)

    monkeypatch.setattr(torch, "compile", stand_in)
    plain, given = options(output=tmp_path / "plain"), options(compile=True, output=tmp_path / "compiled")
    train(app, plain, 1)
    assert compiled == []
    train(app, given, 1)
    assert len(compiled) == 1
    assert_same_bits(result(given)[:2], result(plain)[:2])


def test_compile_without_a_compiler_says_so(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AgreedError, match="--compile needs a C\\+\\+ compiler, and there is no no-such-compiler"):
        train(app, options(compile=True), 2)


def test_the_device_is_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert own_device(0, "cpu") == torch.device("cpu")
    assert used == []
    assert [own_device(rank, kind).index for rank in range(3) for kind in ("auto", "cuda")] == [0, 0, 1, 1, 0, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device(1, "auto") == torch.device("cpu")
    with pytest.raises(RunError, match="--device cuda, but torch sees no GPU here"):
        own_device(0, "cuda")


def test_so_many_checkpoints_are_kept(app: App, options: Callable[..., Options]) -> None:
    for keep, expected in ((1, ["00000006"]), (3, ["00000004", "00000005", "00000006"])):
        given = options(keep=keep, checkpoint_every=1, overwrite=True)
        train(app, given, 2)
        assert [folder.name for folder in RunFolder(given.output).checkpoints.complete()] == expected
    assert parse([], app, world_size=None).keep == 2
    train(app, replace(given, overwrite=False, resume="previous", keep=2), 2)
    assert [folder.name for folder in RunFolder(given.output).checkpoints.complete()] == ["00000005", "00000006"]
