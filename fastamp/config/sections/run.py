"""Config keys outside of any section, e.g. ``SEED`` and ``OUTPUT_DIR``."""

from fastamp.config.key import Key

KEYS = (
    Key("OUTPUT_DIR", "logs/", "Run folder: config, logs, metrics and checkpoints."),
    Key(
        "PROJECTS",
        (),
        "Projects of fastamp whose components and keys this config uses; recipes of a project set it.",
        of=str,
    ),
    Key(
        "PLUGINS",
        (),
        "Plugin files with which this config was read (--plugin). A saved config names them; they are not run unless "
        "--plugin is given again.",
        of=str,
    ),
    Key("SEED", 0, "Seed of all random draws: weight initialization, sampling, augmentation.", low=0),
    Key(
        "DETERMINISTIC",
        False,
        "Use deterministic algorithms, so that two runs with the same seed are bit-identical; an operation without a "
        "deterministic algorithm is an error.",
    ),
    Key(
        "DIST_TIMEOUT_MINUTES",
        0.0,
        "Several processes: timeout of the rendezvous and of collective operations, e.g. of processes that wait while "
        "rank 0 ranks a large test set; 0 is PyTorch's default (30 minutes).",
        low=0,
        high=525600,
    ),
    Key("LOG_PERIOD", 50, "Interval between writes to the log, metrics.json and TensorBoard, in iterations.", low=1),
    Key(
        "LOG_ACTIVATION_STATS",
        False,
        "Every LOG_PERIOD iterations, log the largest absolute activation, the layer that computed it, and its ratio "
        "to the largest value of the dtype.",
    ),
    Key(
        "CUDNN_BENCHMARK",
        False,
        "Let cuDNN benchmark its convolution algorithms and use the fastest; useful if input sizes are constant.",
    ),
)
