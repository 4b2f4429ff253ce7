"""Run the scripts in tests/failures; each reproduces a failure in plain PyTorch, then shows how fastamp reacts."""

import json
from pathlib import Path

import preloaded
import pytest

FOLDER = Path(__file__).parents[1] / "failures"

# script -> (expected output of plain PyTorch, expected output of fastamp)
EXPECTED = {
    "no_inf_checks": (
        ["AssertionError: No inf checks were recorded for this optimizer"],
        [
            "after 0 steps",
            "4 tensors in the optimizers, 0 in both",
            "4 with a gradient",
            "after the fix: loss",
        ],
    ),
    "device_type": (
        ["TypeError", "'device_type'", "output torch.float32", "a loss of 1 is scaled to 1.0", "evaluated in float16"],
        [
            "bf16 on cpu",
            "the first-ranked image for 0 of 500",
            "the precision policy is for cuda, but parameters are on cpu",
            "ran no operation in bfloat16",
            "these weights were trained in bfloat16",
        ],
    ),
    "one_channel": (
        ["a valid one-channel model: AMP checks failed"],
        [
            "a valid one-channel model: pre-flight passed in bfloat16",
            "squash (Root)",
            "SOLVER.BASE_LR",
            "expected 3 channels, got 1",
        ],
    ),
    "nan_at_test_time": (
        ["0 of 10 are NaN", "gradient norm: inf", "mean of the run inf", "1024 of 1024 features are NaN"],
        [
            "forward overflow in backbone.layers.0.blocks.0.op.scan (CrossScan)",
            "SOLVER.AMP.FORCE_FP32 \"['backbone.layers.0.blocks.0.op.scan']\"",
            "0 of 1024 features are NaN",
        ],
    ),
    "learns_nothing": (
        ["1 value(s) in 300 steps", "no message"],
        [
            "an optimizer over a flat buffer, at iteration 0",
            "(shapes (676,))",
            "a learning rate too small for float32, at iteration 3",
            "SOLVER.BASE_LR",
            "after the fix: loss",
        ],
    ),
}

# Run each script with the relevant check of fastamp disabled, all in one process; the last line is JSON.
CONTROLS = """
import json, runpy, sys
from unittest import mock
from fastamp.diagnostics.preflight import PreflightReport

passes = lambda model, batch, *, policy, **_: PreflightReport(policy, loss_scale=1.0)
missing = {
    "no_inf_checks": ("fastamp.diagnostics.precision_diagnostics.check_optimizers", lambda *_: None),
    "device_type": ("fastamp.amp.PrecisionPolicy.check_model", lambda *_: None),
    "one_channel": ("fastamp.diagnostics.preflight.preflight", passes),
    "nan_at_test_time": ("fastamp.diagnostics.preflight.preflight", passes),
    "learns_nothing": ("fastamp.amp.checks.ParameterUpdateMonitor.check", lambda *_: None),
}
codes = {}
for name, (target, replacement) in missing.items():
    with mock.patch(target, replacement):
        try:
            runpy.run_path(f"{sys.argv[1]}/{name}.py", run_name="__main__")
        except SystemExit as error:
            codes[name] = error.code
print(json.dumps(codes))
"""


@pytest.mark.integration
@pytest.mark.failure("autocast without a device type, or with a wrong one")
@pytest.mark.failure("evaluation in another precision than training")
@pytest.mark.failure("check of AMP with an RGB image")
@pytest.mark.failure("float32 only while gradients are enabled (VMamba's scan)")
@pytest.mark.parametrize("name", EXPECTED)
def test_failure_script_prints_plain_pytorch_failure_and_fastamp_fix(name):
    process = preloaded.run(FOLDER / f"{name}.py")
    assert process.returncode == 0, process.stdout + process.stderr
    before, _, fastamp = process.stdout.partition("== fastamp ==")
    heading, _, plain = before.partition("== plain PyTorch ==")
    assert not heading
    for text, expected in zip((plain, fastamp), EXPECTED[name], strict=True):
        assert [words for words in expected if words not in text] == []


@pytest.mark.integration
def test_failure_script_fails_if_the_fastamp_check_is_disabled(tmp_path):
    script = tmp_path / "controls.py"
    script.write_text(CONTROLS)
    process = preloaded.run(script, FOLDER)
    assert process.returncode == 0, process.stderr
    codes = json.loads(process.stdout.splitlines()[-1])
    assert codes.keys() == EXPECTED.keys()
    assert all(code.startswith("not shown: ") for code in codes.values())  # SystemExit with text is exit code 1


def test_readme_lists_every_failure_script():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert scripts == {f"{name}.py" for name in EXPECTED}
    assert [name for name in scripts if f"({name})" not in text or f"[{name}]" not in text] == []
