"""Snapshot test of all messages: each file here triggers the messages of one package; snapshot/ stores their text.

snapshot/SECTION.txt has the messages of each invocation. SECTION.json has the first message of each site; the message
reference of the documentation is generated from it. Run `python tests/messages/update.py` to update both.
"""

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from messages import REPOSITORY, Recorder

from fastamp.utils.registry import Registry

HERE = Path(__file__).parent
SECTIONS = sorted(file.stem for file in HERE.glob("*.py") if file.stem not in ("test_messages", "update"))
MARKS = {"projects": pytest.mark.tune, "hub": pytest.mark.extras}
NOT_REACHED = "## Sites that no invocation above reaches"


@pytest.fixture
def bare_machine(monkeypatch):
    """Hide what messages depend on: GPUs, CPU properties and components that other tests registered."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    replaced = {"native_bfloat16": lambda device: (True, "native bfloat16"), "available_cores": lambda: 2}
    for module in [each for name, each in sys.modules.items() if name.startswith("fastamp.")]:
        for name, function in replaced.items():
            if name in vars(module):
                monkeypatch.setattr(module, name, function)
    for registry in [each for each in gc.get_objects() if type(each) is Registry]:
        own = {name: each for name, each in registry._components.items() if not _is_test(each)}
        monkeypatch.setattr(registry, "_components", own)


def _is_test(component):
    """Return True if a component was registered by another test."""
    name = getattr(component, "__module__", "")
    file = getattr(sys.modules.get(name), "__file__", None) or name
    return name != "tiny" and ("/tests/" in file or "test_" in name)


@pytest.mark.parametrize("section", [pytest.param(name, marks=MARKS.get(name, ())) for name in SECTIONS])
def test_recorded_messages_match_the_snapshot(section, demo, run_folder, bare_machine, tmp_path, request):
    snapshot = HERE / "snapshot" / f"{section}.txt"
    update = bool(os.environ.get("UPDATE_MESSAGES"))
    spec = importlib.util.spec_from_file_location(f"messages_{section}", HERE / f"{section}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = Recorder(tmp_path, {demo: "DATASETS", run_folder: "RUN"})
    module.invoke(record, request)
    examples = record.examples(module.SITES)
    missing = [site for site, message in examples if not message]
    examples_file = snapshot.with_suffix(".json")
    if update:
        snapshot.parent.mkdir(exist_ok=True)
        examples_file.write_text(json.dumps(examples, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        snapshot.write_text("\n".join([record.text(), NOT_REACHED, *missing]) + "\n")
        return
    expected, _, listed = snapshot.read_text().partition(NOT_REACHED)
    command = f"python tests/messages/update.py {section}"
    new = [site for site in missing if site not in listed.splitlines()]
    assert not new, (
        f"no invocation in tests/messages/{section}.py reaches {len(new)} sites:\n" + "\n".join(new) + "\n"
        f"fix: add an invocation for each; where that is not possible, `{command}` lists them as not reached"
    )
    assert record.text().split("\n") == [*expected.strip().split("\n"), ""], (
        f"messages differ from {snapshot.relative_to(REPOSITORY)}; if they should, run `{command}` and review the diff"
    )
    assert json.loads(examples_file.read_text(encoding="utf-8")) == examples, (
        f"the messages of sites differ from {examples_file.relative_to(REPOSITORY)}: run `{command}`"
    )
