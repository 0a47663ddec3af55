"""Runs the items of one module, and writes what came of each.

usage: torchrun --nproc-per-node 2 on_two_ranks.py REPORT.json MODULE
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

report, module = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the frameworks take it
outcomes = {}
for item in import_module(module).ITEMS:
    error, folder = None, report.parent / module / item.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            item.run(folder)
    except (Exception, pytest.fail.Exception):  # the latter of pytest.warns and raises
        error = traceback.format_exc()
    errors = [None, None]
    dist.all_gather_object(errors, error)
    outcomes[item.name] = errors
    if any(errors):
        print(item.name, *errors, flush=True)
if dist.get_rank() == 0:
    report.write_text(json.dumps(outcomes))
