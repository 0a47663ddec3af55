"""Files of examples/ for clusters, as far as they can be tested without one; jobs of the workflow run them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from thinwire_cifar.__main__ import APP
from thinwire_trainer.command_line.flags import parse
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parent.parent
EXAMPLES, GUIDES = ROOT / "examples", ROOT / "docs" / "guides"
JOBS = sorted(EXAMPLES.glob("slurm/*.sbatch"))
MANIFESTS = sorted(EXAMPLES.glob("kubernetes/*.yaml"))
ENTRY = EXAMPLES / "kubernetes" / "entrypoint.sh"


def named(paths):
    return {"argvalues": paths, "ids": [path.name for path in paths]}


@pytest.mark.parametrize("script", **named([*JOBS, *EXAMPLES.glob("*/*.sh")]))
def test_scripts_are_bash(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def words(job):
    """The command of a job, its variables filled in, and without what is asked of the shell."""
    text = job.read_text().replace("\\\n", " ")
    for variable in ("run", "head", "SLURM_NNODES", "SLURMD_NODENAME"):
        text = text.replace(f"${variable}", "4")
    [command] = re.findall(r"^srun (.*)$", re.sub(r'\$\([^)]*\)|"\$@"', "", text), re.MULTILINE)
    return shlex.split(command)


@pytest.mark.parametrize("job", **named(JOBS))
def test_jobs_are_commands_that_are_taken(job):
    command = words(job)
    options = parse(command[command.index("cifar") + 1 :], APP, world_size=4)
    assert str(options.output) in ("4", f"runs/{job.stem}")  # each has a folder of its own, so that none meets another
    assert options.max_epochs == 140
    if "torchrun" in command:
        asked = get_args_parser().parse_args(command[command.index("torchrun") + 1 :])
        assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_endpoint) == ("4", "2", "4:29400")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_guides_quote_the_files():
    """One source: who changes a file pastes it into its page."""
    assert blocks(GUIDES / "slurm.md", "bash") == [
        (EXAMPLES / "slurm" / f"{name}.sbatch").read_text() for name in ("srun", "torchrun", "requeue", "elastic")
    ]
    assert ENTRY.read_text() in blocks(GUIDES / "kubernetes.md", "bash")
    scripts = "".join(path.read_text() for path in EXAMPLES.glob("ray/*.py"))
    quoted = blocks(GUIDES / "ray.md", "py")
    assert len(quoted) == 5
    assert all(block in scripts for block in quoted)


@pytest.mark.parametrize(
    ("guide", "script", "announced"),
    [
        ("slurm", "try.sh", r"^ +submit (.*)$"),
        ("ray", "try.py", r'\["(\w+\.py.*?)"\]'),
        ("kubernetes", "try.sh", r"^echo '(.*)'$"),
    ],
)
def test_guides_show_what_the_scripts_wrote(guide, script, announced):
    """All that a script says it runs is in the output that the page shows, in that order."""
    [output] = blocks(GUIDES / f"{guide}.md", "text")
    text = (EXAMPLES / guide / script).read_text()
    commands = [command.replace('", "', " ") for command in re.findall(announced, text, re.MULTILINE)]
    assert len(commands) >= 4
    places = [output.find(f"{command}\n") for command in commands]
    assert -1 not in places
    assert places == sorted(places)


def pods(tree):
    """Specs of all pods in it."""
    if isinstance(tree, dict):
        return [tree] if "containers" in tree else [pod for part in tree.values() for pod in pods(part)]
    return [pod for part in tree for pod in pods(part)] if isinstance(tree, list) else []


def checked_by_kubernetes(thing):
    kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


SCHEMAS = json.loads((Path(__file__).parent / "custom_resources.json").read_text())


def check(manifest):
    for thing in yaml.safe_load_all(manifest):
        if (schema := SCHEMAS.get(f"{thing['apiVersion']} {thing['kind']}")) is None:
            checked_by_kubernetes(thing)
        else:
            jsonschema.validate(thing, schema)
        for pod in pods(thing):
            checked_by_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod})


@pytest.mark.parametrize("path", **named(MANIFESTS))
def test_manifests_follow_their_schemas(path):
    check(path.read_text())


FIELDS = ("accessModes", "numNodes", "replicas", "image")


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path in MANIFESTS for field in FIELDS if f" {field}:" in path.read_text()],
)
def test_a_misspelt_field_is_found(path, field):
    """Of the object, and of its pod: a check that takes anything would be none."""
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(path.read_text().replace(f"{field}:", f"{field}s:"))


@pytest.mark.parametrize("path", **named(MANIFESTS))
def test_manifests_flags_are_taken(path):
    lists = re.findall(r"args: \[cifar, (.*)\]", path.read_text())
    text = re.findall(r"entrypoint.sh cifar (.*?)\$\(", path.read_text().replace("\\\n", " "))
    assert len(lists) + len(text) == (path.name != "volume.yaml")
    for flags in [*(words.split(", ") for words in lists), *map(shlex.split, text)]:
        assert str(parse(flags, APP, world_size=4).output) == f"runs/{path.stem}"


TOLD = '#!/bin/bash\necho "$(basename "$0") $*" "${RANK:-}" "${WORLD_SIZE:-}" "${MASTER_ADDR:-}" "${MASTER_PORT:-}"\n'


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PET_NNODES": "2", "RANK": "1", "WORLD_SIZE": "2"}, "torchrun -m cifar --dnn mlp 1 2"),
        ({"HYDRA_HOST_FILE": "hosts"}, "mpiexec -n 5 python -m cifar --dnn mlp"),
        (
            {"REPLICAS": "12", "SERVICE": "near", "HOSTNAME": "my-ranks-11"},
            "python -m cifar --dnn mlp 11 12 my-ranks-0.near 29500",
        ),
        ({"HOSTNAME": "my-ranks-11"}, "python -m cifar --dnn mlp"),
    ],
)
def test_the_entry_point_becomes_the_rank(tmp_path, environment, told):
    for name in ("torchrun", "mpiexec", "python"):
        (tmp_path / name).write_text(TOLD)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("a:2\nb:2\nc\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
    command = ["bash", ENTRY, "cifar", "--dnn", "mlp"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == told, done.stderr


@pytest.mark.few(0)
@pytest.mark.mpi
@pytest.mark.mpich
def test_the_container_trains(tmp_path):
    """As it does without one: with what each operator sets."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = ["bash", EXAMPLES / "kubernetes" / "try.sh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("epoch   3/3") == 3
    assert not list(tmp_path.iterdir())
