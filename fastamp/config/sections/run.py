"""The run as a whole."""

from fastamp.config.key import Key

KEYS = (
    Key("OUTPUT_DIR", "logs/", "Folder for the config, logs, metrics and checkpoints of the run."),
    Key("SEED", 0, "Seed of every random draw: initial weights, sampling, augmentation.", low=0),
    Key(
        "DETERMINISTIC",
        False,
        "Compute so that two runs of the same seed are equal bit for bit; an operation that cannot is an error.",
    ),
    Key("LOG_PERIOD", 50, "Iterations between two lines of the log, metrics.json and TensorBoard.", low=1),
    Key(
        "LOG_ACTIVATION_STATS",
        False,
        "Report the largest activation, its layer and its share of the dtype's limit, once a log period.",
    ),
    Key("CUDNN_BENCHMARK", False, "Let cuDNN time its algorithms and keep the fastest; pays where sizes are constant."),
)
