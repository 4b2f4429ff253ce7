"""Config keys of metric loggers and experiment trackers."""

from fastamp.config.key import Key

KEYS = (
    Key(
        "LOGGERS",
        ("tensorboard",),
        "Loggers of the metrics, in addition to the console and metrics.json: tensorboard, or the experiment trackers "
        "wandb, mlflow and clearml (extras of the same names); plugins may register others.",
        of=str,
    ),
    Key("TRACKING.PROJECT", "fastamp", "Project (W&B, ClearML) or experiment (MLflow) that contains the run."),
    Key("TRACKING.NAME", "", "Name of the run in experiment trackers; empty for the last part of OUTPUT_DIR."),
    Key("TRACKING.GROUP", "", "Group of runs in experiment trackers; --seeds sets it if it is empty."),
    Key("TRACKING.TAGS", (), "Tags of the run in experiment trackers.", of=str),
    Key(
        "TRACKING.ARTIFACTS",
        ("report.html", "model_best.pth", "model_final.pth"),
        "Files of OUTPUT_DIR to upload to experiment trackers at the end of a run.",
        of=str,
    ),
    Key(
        "TRACKING.TIMEOUT",
        120.0,
        "Seconds to wait for an experiment tracker at the end of a run, including uploads.",
        above=0,
    ),
    Key("TRACKING.TRIALS", False, "FastTune: also track each trial as a run."),
)
