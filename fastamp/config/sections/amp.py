"""Mixed precision: SOLVER.AMP."""

from fastamp.config.key import Key

KEYS = (
    Key("SOLVER.AMP.ENABLED", False, "Mixed precision. SOLVER.AMP on, off, bf16 or fp16 is the short spelling."),
    Key(
        "SOLVER.AMP.DTYPE",
        "auto",
        "The low precision; auto takes bfloat16 where the device has it, else float16 with "
        "loss scaling on CUDA, else none.",
        choices=("auto", "bfloat16", "float16"),
        aliases={"bf16": "bfloat16", "fp16": "float16"},
    ),
    Key("SOLVER.AMP.INIT_SCALE", 65536.0, "Loss scale at the start (float16 only, as all of the scaling).", above=0),
    Key("SOLVER.AMP.GROWTH_FACTOR", 2.0, "Factor on the loss scale after GROWTH_INTERVAL good steps.", above=1),
    Key(
        "SOLVER.AMP.BACKOFF_FACTOR",
        0.5,
        "Factor on the loss scale after a step that overflowed and was skipped.",
        above=0,
        high=0.999,
    ),
    Key("SOLVER.AMP.GROWTH_INTERVAL", 2000, "Good steps in a row before the loss scale grows, in iterations.", low=1),
    Key("SOLVER.AMP.MIN_SCALE", 1.0, "Floor of the loss scale.", above=0),
    Key("SOLVER.AMP.MAX_SCALE", 2.0**24, "Ceiling of the loss scale.", above=0),
    Key(
        "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS",
        25,
        "Skipped steps in a row, in iterations, after which ON_FAILURE decides.",
        low=0,
    ),
    Key(
        "SOLVER.AMP.ON_FAILURE",
        "error",
        "When mixed precision cannot go on (see MAX_CONSECUTIVE_SKIPS): stop, or continue in that dtype, once.",
        choices=("error", "bfloat16", "float32"),
        aliases={"bf16": "bfloat16", "fp32": "float32"},
    ),
    Key(
        "SOLVER.AMP.FORCE_FP32",
        (),
        "Modules that always compute in float32: globs of module names, or class names.",
        of=str,
    ),
    Key(
        "SOLVER.AMP.PREFLIGHT",
        "error",
        "A trial of the first batch before the first step, with AMP on or off; when it fails: warn, stop (error), or "
        "train in bfloat16 where that is native, else in float32 (fallback).",
        choices=("off", "warn", "error", "fallback"),
    ),
    Key(
        "SOLVER.AMP.EVAL_DTYPE",
        "same",
        "Precision of evaluation: same as training, or float32.",
        choices=("same", "float32"),
        aliases={"fp32": "float32"},
    ),
    Key(
        "SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP",
        True,
        "Restore the buffers of normalization layers, memory banks and moving averages when a step is skipped.",
    ),
    Key(
        "SOLVER.AMP.TRACE_NONFINITE",
        "on_failure",
        "Search for the first module that made a non-finite value, and write OUTPUT_DIR/amp_crash/, when AMP fails.",
        choices=("on_failure", "off"),
    ),
)
