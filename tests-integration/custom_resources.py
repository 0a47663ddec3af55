"""Makes custom_resources.json, the schemas of Kubeflow's objects, from its definitions (CustomResourceDefinition).

    python tests-integration/custom_resources.py FILE.yaml... > tests-integration/custom_resources.json

Taken from them, all Apache-2.0: kubeflow/trainer v2.3 (TrainingRuntime, TrainJob), kubeflow/training-operator 1.9
(PyTorchJob) and kubeflow/mpi-operator v0.8 (MPIJob). Left out: descriptions, `status`, and what is in a pod, whose
schema is Kubernetes' own. Added: that an object has no other fields, which a cluster would drop in silence.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KEPT = ("type", "required", "enum", "anyOf", "minimum", "pattern")


def schema(given: dict[str, Any]) -> dict[str, Any]:
    """Part of a definition, or all of it, as a JSON schema."""
    fields = given.get("properties", {})
    if {"containers", "volumes"} <= set(fields):
        return {"type": "object"}
    made = {key: given[key] for key in KEPT if key in given}
    if fields:
        made["properties"] = {name: schema(field) for name, field in fields.items() if name != "status"}
        made["additionalProperties"] = "x-kubernetes-preserve-unknown-fields" in given
    for key in ("items", "additionalProperties"):
        if isinstance(given.get(key), dict):
            made[key] = schema(given[key])
    return made


def main() -> None:
    schemas = {}
    for path in sys.argv[1:]:
        spec = yaml.safe_load(Path(path).read_text())["spec"]
        for version in spec["versions"]:
            name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
            schemas[name] = schema(version["schema"]["openAPIV3Schema"])
    lines = [f"{json.dumps(name)}: {json.dumps(made)}" for name, made in sorted(schemas.items())]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
