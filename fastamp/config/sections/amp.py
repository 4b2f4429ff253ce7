"""Config keys of mixed precision: the section ``SOLVER.AMP``."""

from fastamp.config.key import Key

KEYS = (
    Key("SOLVER.AMP.ENABLED", False, "Train in mixed precision. Shorthand: SOLVER.AMP on, off, bf16 or fp16."),
    Key(
        "SOLVER.AMP.DTYPE",
        "auto",
        "Low-precision dtype; auto selects bfloat16 if the device supports it natively, else float16 with loss "
        "scaling on CUDA, else float32.",
        choices=("auto", "bfloat16", "float16"),
        aliases={"bf16": "bfloat16", "fp16": "float16"},
    ),
    Key("SOLVER.AMP.INIT_SCALE", 65536.0, "Initial loss scale (float16 only, like all loss scaling).", above=0),
    Key(
        "SOLVER.AMP.GROWTH_FACTOR",
        2.0,
        "Factor by which the loss scale grows after GROWTH_INTERVAL steps without overflow.",
        above=1,
    ),
    Key(
        "SOLVER.AMP.BACKOFF_FACTOR",
        0.5,
        "Factor by which the loss scale is multiplied after a step that is skipped because of an overflow.",
        above=0,
        high=0.999,
    ),
    Key(
        "SOLVER.AMP.GROWTH_INTERVAL",
        2000,
        "Consecutive steps without overflow before the loss scale grows, in iterations.",
        low=1,
    ),
    Key("SOLVER.AMP.MIN_SCALE", 1.0, "Minimum loss scale.", above=0),
    Key("SOLVER.AMP.MAX_SCALE", 2.0**24, "Maximum loss scale.", above=0),
    Key(
        "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS",
        25,
        "Number of consecutive skipped steps that are tolerated; the next skipped step triggers ON_FAILURE.",
        low=0,
    ),
    Key(
        "SOLVER.AMP.ON_FAILURE",
        "error",
        "Action if more than MAX_CONSECUTIVE_SKIPS steps are skipped: stop (error), or, once per run, continue in "
        "bfloat16 or float32.",
        choices=("error", "bfloat16", "float32"),
        aliases={"bf16": "bfloat16", "fp32": "float32"},
    ),
    Key(
        "SOLVER.AMP.FORCE_FP32",
        (),
        "Modules that always compute in float32: glob patterns of module names, or class names.",
        of=str,
    ),
    Key(
        "SOLVER.AMP.PREFLIGHT",
        "error",
        "Precision checks on the first batch before the first step, with AMP on or off. On failure: log a warning "
        "(warn), stop (error), or train in bfloat16 if the device supports it natively, else in float32 (fallback).",
        choices=("off", "warn", "error", "fallback"),
    ),
    Key(
        "SOLVER.AMP.EVAL_DTYPE",
        "same",
        "Precision of evaluation: same as in training, or float32.",
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
        "If mixed precision fails, locate the first module with a non-finite output, and write a crash dump to "
        "OUTPUT_DIR/amp_crash/.",
        choices=("on_failure", "off"),
    ),
)
