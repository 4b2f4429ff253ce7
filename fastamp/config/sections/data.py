"""Config keys of images and datasets: the sections ``INPUT``, ``DATASETS`` and ``DATALOADER``."""

from fastamp.config.key import Key

KEYS = (
    Key(
        "INPUT.SIZE_TRAIN",
        (256, 128),
        "Size of resized training images, in pixels: (height, width); (shorter_side,) keeps the aspect ratio; (0,) "
        "disables resizing. A single number requires INPUT.CROP, or images that all have the same shape.",
        low=0,
        high=8192,
        forms="(height, width), (shorter_side,) or (0,)",
    ),
    Key(
        "INPUT.SIZE_TEST",
        (256, 128),
        "Size of resized test images, in pixels; same forms as SIZE_TRAIN. With INPUT.CROP, resized images are "
        "center-cropped.",
        low=0,
        high=8192,
        forms="(height, width), (shorter_side,) or (0,)",
    ),
    Key(
        "INPUT.MAX_PIXELS",
        100_000_000,
        "Maximum number of pixels of an image; a larger image is an error. Decoding needs up to 17 bytes per pixel.",
        low=1,
        high=178_956_970,
    ),
    Key(
        "INPUT.BIT_DEPTH",
        16,
        "Bits that the values of grayscale images of more than 8 bits use, e.g. 12 or 14 of thermal cameras: 0 to "
        "2**BIT_DEPTH - 1 become 0 to 255. Larger values are an error. It changes the features.",
        low=8,
        high=32,
    ),
    "INPUT.DECODER",
    Key(
        "INPUT.DECODE_REDUCED",
        False,
        "Decode JPEG files at 1/2, 1/4 or 1/8 of their size if 2, 4 or 8 divides height and width, and at least twice "
        "the height and width to which they are resized remains. PIL decodes these files, whichever INPUT.DECODER is "
        "set. Other files, boxes in images and frames, arrays and PIL images are not affected. It changes the "
        "features slightly.",
    ),
    Key(
        "INPUT.INTERPOLATION",
        "bicubic",
        "Interpolation for resizing, as in Pillow: bicubic and bilinear are antialiased. FastReID uses bicubic, "
        "torchreid bilinear.",
        choices=("bicubic", "bilinear", "nearest"),
    ),
    Key(
        "INPUT.INTERPOLATION_TEST",
        "same",
        "Interpolation for test images, in evaluation, extraction and export; same means INPUT.INTERPOLATION. "
        "TransReID trains with bicubic and tests with bilinear.",
        choices=("same", "bicubic", "bilinear", "nearest"),
    ),
    Key(
        "INPUT.CHANNELS",
        3,
        "Number of image channels: 1 for grayscale, 3 for RGB, 4 for RGBA. The fourth channel (a mask, infrared, "
        "...) is 255 if a file has none.",
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
        "Where images are augmented: in the worker processes, or on the training device.",
        choices=("worker", "device"),
    ),
    "INPUT.LOCAL_GRAYSCALE",
    Key(
        "DATASETS.NAMES",
        ("Market1501",),
        "Training datasets, which are combined into one: registered names, csv:FILE or folder:FOLDER.",
    ),
    Key("DATASETS.TESTS", ("Market1501",), "Test datasets, evaluated separately; names as in DATASETS.NAMES."),
    "DATASETS.FOLDER",
    Key("DATASETS.COMBINEALL", False, "Also train on query and gallery images; test results are then meaningless."),
    "DATASETS.MARKET1501_500K",
    "DATASETS.MSMT17",
    "DATASETS.CUHK03",
    "DATASETS.VIPER",
    "DATASETS.VERI",
    "DATASETS.VEHICLEID",
    "DATASETS.REGDB",
    "DATASETS.AGREID",
    "DATASETS.AGREIDV2",
    "DATASETS.MARS",
    "DATASETS.ILIDSVID",
    "DATASETS.PRID2011",
    Key(
        "DATASETS.MIN_IMAGES",
        1,
        "Exclude identities with fewer training images, e.g. 4 as in MiewID; 1 keeps all.",
        low=1,
    ),
    "DATASETS.CATEGORIES",
    "DATASETS.NUM_CATEGORIES",
    "DATASETS.CAMERAS",
    Key(
        "DATALOADER.SAMPLER_TRAIN",
        "TrainingSampler",
        "Training sampler: TrainingSampler (uniform over images), ImbalancedDatasetSampler (uniform over "
        "identities), or NaiveIdentitySampler, BalancedIdentitySampler, ColumnBalancedSampler, GroupIdentitySampler, "
        "SetReWeightSampler (NUM_INSTANCE images per identity), TrackletSampler (tracklets of video).",
    ),
    Key(
        "DATALOADER.NUM_INSTANCE",
        4,
        "Images per identity in a batch, for the identity samplers; 0 chooses 2 to 4 by the number of images that at "
        "least half of the identities have.",
        low=0,
    ),
    "DATALOADER.BALANCE_COLUMN",
    "DATALOADER.GROUPS",
    "DATALOADER.TRACKLET",
    Key(
        "DATALOADER.NUM_WORKERS",
        8,
        "Worker processes per rank for training images, at most the number of available cores; 0 loads in the main "
        "process.",
        low=0,
    ),
    Key(
        "DATALOADER.SET_WEIGHT",
        (),
        "Relative weight of each dataset of DATASETS.NAMES in a batch, for SetReWeightSampler.",
        of=float,
    ),
    Key(
        "DATALOADER.CACHE",
        "none",
        "Cache of decoded and resized images: on disk for all runs (disk), or in shared memory for one run (ram).",
        choices=("none", "ram", "disk"),
    ),
    Key(
        "DATALOADER.CACHE_DIR",
        "",
        "Folder of the disk cache; '' means .fastamp-cache in the data root, or ~/.cache/fastamp if the data root "
        "is read-only.",
    ),
    Key(
        "DATALOADER.ON_CORRUPT",
        "error",
        "Action on a training image that cannot be read: stop (error), or replace it with another image of its "
        "identity (skip).",
        choices=("error", "skip"),
    ),
)
