"""Images and data sets: INPUT, DATASETS and DATALOADER."""

from fastamp.config.key import Key

KEYS = (
    Key(
        "INPUT.SIZE_TRAIN",
        (256, 128),
        "Size that training images are resized to, in pixels: (height, width); (shorter_side,) keeps the aspect ratio; "
        "(0,) does not resize. One number needs INPUT.CROP, or images of one size.",
        low=0,
        high=8192,
        forms="(height, width), (shorter_side,) or (0,)",
    ),
    Key(
        "INPUT.SIZE_TEST",
        (256, 128),
        "Size that test images are resized to, in pixels, given as SIZE_TRAIN; with INPUT.CROP their center is then "
        "cut out.",
        low=0,
        high=8192,
        forms="(height, width), (shorter_side,) or (0,)",
    ),
    Key(
        "INPUT.MAX_PIXELS",
        100_000_000,
        "Largest image that is decoded, width x height; a larger one is an error. Decoding takes up to 17 bytes a "
        "pixel.",
        low=1,
        high=178_956_970,
    ),
    Key(
        "INPUT.INTERPOLATION",
        "bicubic",
        "Interpolation by which images are resized, as by Pillow: bicubic and bilinear are antialiased. FastReID uses "
        "bicubic, torchreid bilinear.",
        choices=("bicubic", "bilinear", "nearest"),
    ),
    Key(
        "INPUT.INTERPOLATION_TEST",
        "same",
        "Interpolation of test images, in evaluation, extraction and export: same is INPUT.INTERPOLATION. TransReID "
        "trains with bicubic and tests with bilinear.",
        choices=("same", "bicubic", "bilinear", "nearest"),
    ),
    Key(
        "INPUT.CHANNELS",
        3,
        "Channels that images are read with: 1 is grey, 3 RGB, 4 RGBA, whose fourth (a mask, infrared, ...) is 255 "
        "where a file has none.",
        choices=(1, 3, 4),
    ),
    "INPUT.FLIP",
    "INPUT.PADDING",
    "INPUT.CROP",
    "INPUT.REA",
    "INPUT.CJ",
    "INPUT.AFFINE",
    "INPUT.AUTOAUG",
    "INPUT.AUGMIX",
    "INPUT.RPT",
    "INPUT.RANDAUG",
    "INPUT.GRAYSCALE",
    "INPUT.BLUR",
    Key(
        "INPUT.AUGMENT_ON",
        "worker",
        "Where images are augmented: in the processes that load them, or on the device that trains.",
        choices=("worker", "device"),
    ),
    "INPUT.LOCAL_GRAYSCALE",
    Key(
        "DATASETS.NAMES",
        ("Market1501",),
        "Data sets to train on, together: registered names, csv:FILE or folder:FOLDER.",
    ),
    Key("DATASETS.TESTS", ("Market1501",), "Data sets to evaluate on, one after the other."),
    "DATASETS.FOLDER",
    Key("DATASETS.COMBINEALL", False, "Train on the query and gallery images too; the test results then mean nothing."),
    "DATASETS.MARKET1501_500K",
    "DATASETS.MSMT17",
    "DATASETS.CUHK03",
    "DATASETS.VIPER",
    "DATASETS.VERI",
    "DATASETS.VEHICLEID",
    Key(
        "DATALOADER.SAMPLER_TRAIN",
        "TrainingSampler",
        "How batches are drawn: TrainingSampler (any image), ImbalancedDatasetSampler (each identity equally often), "
        "or NaiveIdentitySampler, BalancedIdentitySampler, SetReWeightSampler (NUM_INSTANCE images of each identity).",
    ),
    Key("DATALOADER.NUM_INSTANCE", 4, "Images of one identity in a batch, for the identity samplers.", low=1),
    Key(
        "DATALOADER.NUM_WORKERS",
        8,
        "Processes that load training images, a rank; no more than the cores at hand are "
        "started, 0 loads in the trainer's own.",
        low=0,
    ),
    Key(
        "DATALOADER.SET_WEIGHT",
        (),
        "Relative weight of each set of DATASETS.NAMES in a batch, for SetReWeightSampler.",
        of=float,
    ),
    Key(
        "DATALOADER.CACHE",
        "none",
        "Images decoded and resized once: kept on disk for later runs too, or in memory while a run uses them.",
        choices=("none", "ram", "disk"),
    ),
    Key(
        "DATALOADER.CACHE_DIR",
        "",
        "Folder of the cache on disk; empty is .fastamp-cache in the data root, or ~/.cache/fastamp if that is "
        "read-only.",
    ),
    Key(
        "DATALOADER.ON_CORRUPT",
        "error",
        "A training image that cannot be read stops the training, or another one of its identity takes its place.",
        choices=("error", "skip"),
    ),
)
