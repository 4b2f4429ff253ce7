"""Every config key with its default, its meaning and its unit: the one table behind the config and its documentation.

Lengths of time are in epochs or iterations (optimizer steps tried), sizes in pixels, height before width;
a batch counts the images over all ranks; a share or a probability lies in 0..1.
"""

from typing import Any

from fastamp.config.key import Key

KEYS: dict[str, Key] = {}


def define(path: str, default: Any, meaning: str, **options: Any) -> None:
    """Declare a key; ``options`` are ``Key``'s ``choices``, ``aliases``, ``of`` and bounds."""
    KEYS[path] = Key(path, default, meaning, **options)


# ---- the run
define("OUTPUT_DIR", "logs/", "Folder for the config, logs, metrics and checkpoints of the run.")
define("SEED", 0, "Seed of every random draw: initial weights, sampling, augmentation.", low=0)
define(
    "DETERMINISTIC",
    False,
    "Compute so that two runs of the same seed are equal bit for bit; an operation that cannot is an error.",
)
define("LOG_PERIOD", 50, "Iterations between two lines of the log, metrics.json and TensorBoard.", low=1)
define(
    "LOG_ACTIVATIONS",
    False,
    "Report the largest activation, its layer and its share of the dtype's limit, once a log period.",
)
define("CUDNN_BENCHMARK", False, "Let cuDNN time its algorithms and keep the fastest; pays where sizes are constant.")

# ---- model
define("MODEL.META_ARCHITECTURE", "Baseline", "The whole model: how backbone, heads and losses are put together.")
define("MODEL.DEVICE", "cuda", "Where to compute: auto (CUDA, else MPS, else the CPU), cpu, cuda, cuda:N or mps.")
define(
    "MODEL.CHANNELS_LAST",
    "auto",
    "Keep the channels of a feature map next to each other in memory; auto is on for a CPU, and for CUDA under AMP.",
    choices=("auto", "on", "off"),
)
define("MODEL.WEIGHTS", "", "File whose weights the whole model starts from, or is evaluated with; '' is none.")
define(
    "MODEL.WEIGHTS_MIN_MATCH",
    0.9,
    "Share of the backbone's tensors that a MODEL.WEIGHTS file must provide, else it is refused.",
    low=0,
    high=1,
)
define(
    "MODEL.COMPILE",
    "off",
    "Compile the backbone by torch.compile with this backend; it takes minutes, and pays on a GPU where runs are long.",
    choices=("off", "inductor", "aot_eager", "cudagraphs"),
    aliases={"on": "inductor", "true": "inductor", "false": "off"},
)
define(
    "MODEL.FREEZE_LAYERS",
    (),
    "Names of the model's parts, e.g. backbone or backbone.layer1, that stand still for SOLVER.FREEZE_ITERS.",
    of=str,
)
define(
    "MODEL.PIXEL_MEAN",
    (123.675, 116.28, 103.53),
    "Mean of each channel, in 0..255, taken off every image: INPUT.CHANNELS values, or three of RGB, which for grey "
    "images become their luma.",
)
define(
    "MODEL.PIXEL_STD",
    (58.395, 57.120000000000005, 57.375),
    "Standard deviation of each channel, in 0..255, that images are divided by; given as PIXEL_MEAN is.",
    above=0,
)
define("MODEL.QUEUE_SIZE", 8192, "Features kept in the memory bank of the MoCo architecture.", low=1)
define(
    "MODEL.MOCO.MOMENTUM",
    0.999,
    "MoCo: share of the key encoder's weights that each iteration keeps, the rest being the model's; 0 stores the "
    "model's own features, as FastReID does.",
    low=0,
    high=1,
)
define("MODEL.MOCO.MARGIN", 0.25, "MoCo: margin on the cosine similarities with the memory bank.", low=0)
define("MODEL.MOCO.GAMMA", 32.0, "MoCo: factor on them.", above=0)
define("MODEL.MOCO.SCALE", 1.0, "MoCo: weight of the loss over the memory bank in the sum.", low=0)

define("MODEL.BACKBONE.NAME", "build_resnet_backbone", "The network that turns images into feature maps.")
define(
    "MODEL.BACKBONE.DEPTH",
    "50x",
    "Variant of the backbone: 18x, 34x, 50x, 101x, 152x of a ResNet; small, base, deit_small, deit_base of a ViT.",
)
define(
    "MODEL.BACKBONE.LAST_STRIDE",
    1,
    "Stride of the last stage; 1 keeps a feature map twice as large as 2 does.",
    low=1,
    high=2,
)
define(
    "MODEL.BACKBONE.STEM_POOL",
    "ceil",
    "Max pooling of the ResNet stem: ceil rounds the size up without padding, "
    "as FastReID since 2020-08-14; padded pads by 1, as torchvision and FastReID's published v0.1.1 models. "
    "ResNeXt and ResNeSt always pad.",
    choices=("ceil", "padded"),
)
define(
    "MODEL.BACKBONE.FEAT_DIM",
    2048,
    "Channels of the backbone's last feature map. With MODEL.HEADS.POOL_LAYER Flatten the width of the flattened map, "
    "channels x height x width, is accepted too, as in FastReID; the model is the same.",
    low=1,
)
define(
    "MODEL.BACKBONE.NORM",
    "BN",
    "Normalization layers of the backbone: BN, syncBN (statistics over all ranks, CUDA only), GN, or FrozenBN, which "
    "stays as it was pretrained.",
)
define("MODEL.BACKBONE.WITH_IBN", False, "Instance norm on half of the channels in the first three stages (IBN-Net a).")
define("MODEL.BACKBONE.WITH_SE", False, "Squeeze-and-excitation in every block.")
define("MODEL.BACKBONE.WITH_NL", False, "Non-local attention blocks in stages 2 and 3.")
define("MODEL.BACKBONE.PRETRAIN", False, "Start from ImageNet weights: PRETRAIN_PATH's, or else downloaded ones.")
define("MODEL.BACKBONE.PRETRAIN_PATH", "", "File with pretrained weights of the backbone; '' is none.")
define(
    "MODEL.BACKBONE.STRIDE_SIZE",
    (16, 16),
    "ViT: step between two patches, down and across, in pixels; below 16 patches overlap.",
    low=1,
    length=2,
)
define(
    "MODEL.BACKBONE.SIE_CAMERAS",
    0,
    "ViT: cameras, numbered from 0, that have an embedding of their own (TransReID's SIE); 0 is none.",
    low=0,
)
define("MODEL.BACKBONE.SIE_VIEWS", 0, "ViT: views, numbered from 0, that have one, alone or per camera.", low=0)
define("MODEL.BACKBONE.SIE_COE", 3.0, "ViT: weight of the camera and view embedding that is added to the tokens.")
define(
    "MODEL.BACKBONE.CHECKPOINTING",
    False,
    "ViT: keep no block's activations, and compute them again for the gradient: less memory, a third slower.",
)
define(
    "MODEL.BACKBONE.DEPLOY", False, "RepVGG: one convolution a block, for inference; see tools/import_checkpoint.py."
)
define(
    "MODEL.BACKBONE.DROP_PATH_RATIO",
    0.1,
    "ViT: probability of skipping a block (stochastic depth) at the last one; it grows from 0 at the first.",
    low=0,
    high=0.99,
)
define("MODEL.BACKBONE.DROP_RATIO", 0.0, "ViT: dropout probability of tokens and MLPs.", low=0, high=0.99)
define("MODEL.BACKBONE.ATT_DROP_RATE", 0.0, "ViT: dropout probability of attention weights.", low=0, high=0.99)

define("MODEL.HEADS.NAME", "EmbeddingHead", "The part that turns feature maps into features and class logits.")
define(
    "MODEL.HEADS.POOL_LAYER",
    "GlobalAvgPool",
    "Pooling of the feature map to one vector an image: GlobalAvgPool, GlobalMaxPool, GeneralizedMeanPooling, "
    "GeneralizedMeanPoolingP (learned exponent), AdaptiveAvgMaxPool, ClipGlobalAvgPool, FastGlobalAvgPool, Flatten, "
    "Identity.",
)
define(
    "MODEL.HEADS.EMBEDDING_DIM",
    0,
    "Width that a 1x1 convolution reduces the feature to, 0 keeps FEAT_DIM; of FCHead, the width of its layer.",
    low=0,
)
define("MODEL.HEADS.WITH_BNNECK", False, "Batch normalization with a bias frozen at 0 between feature and classifier.")
define("MODEL.HEADS.NORM", "BN", "Normalization layer of that neck.")
define(
    "MODEL.HEADS.NECK_FEAT",
    "before",
    "Which feature the metric losses see: before or after the neck.",
    choices=("before", "after"),
)
define(
    "MODEL.HEADS.EVAL_FEAT",
    "after",
    "Which feature evaluation takes: after the neck, as FastReID, or before it, as TransReID.",
    choices=("before", "after"),
)
define("MODEL.HEADS.JPM.PARTS", 4, "JPMHead: parts of the patches with a feature of their own.", low=1)
define(
    "MODEL.HEADS.JPM.REARRANGE",
    True,
    "JPMHead: shift and shuffle the patches first; off makes the parts bands of rows.",
)
define(
    "MODEL.HEADS.JPM.SHIFT",
    5,
    "JPMHead: patches that the rest moves before, counted as TransReID does: from 1, which moves nothing.",
    low=1,
)
define("MODEL.HEADS.JPM.GROUPS", 2, "JPMHead: runs of patches that are shuffled, taking one of each in turn.", low=1)
define("MODEL.HEADS.CLS_LAYER", "Linear", "Classifier: Linear, ArcSoftmax, CosSoftmax or CircleSoftmax.")
define(
    "MODEL.HEADS.NUM_CLASSES",
    0,
    "Identities that the classifier tells apart; 0 counts those of the training set.",
    low=0,
)
define("MODEL.HEADS.MARGIN", 0.0, "Margin of a margin softmax: a cosine, or an angle in radians for ArcSoftmax.", low=0)
define("MODEL.HEADS.SCALE", 1, "Factor on the classifier's logits; margin softmaxes need about 30 to 128.", above=0)

define(
    "MODEL.LOSSES.NAME",
    ("CrossEntropyLoss",),
    "The losses, which are added up: CrossEntropyLoss, FocalLoss, TripletLoss, CircleLoss, Cosface, CenterLoss, "
    "SupConLoss, or pml/ and the name of one of pytorch-metric-learning's.",
)
define(
    "MODEL.LOSSES.GATHER",
    False,
    "Among several processes: let the triplet and pair losses compare the images of all, not of each process's share, "
    "and the cross entropy average over those of all.",
)
define(
    "MODEL.LOSSES.CE.EPSILON",
    0.0,
    "Cross entropy: label smoothing, the probability spread over the wrong classes; "
    "below 0 it follows the model's confidence (see ALPHA).",
    high=1,
)
define("MODEL.LOSSES.CE.ALPHA", 0.2, "Cross entropy: adaptive smoothing is ALPHA times the right class's probability.")
define("MODEL.LOSSES.CE.SCALE", 1.0, "Cross entropy: weight in the sum.", low=0)
define(
    "MODEL.LOSSES.TRI.MARGIN",
    0.3,
    "Triplet loss: distance by which a negative must be farther; 0 is a soft margin.",
    low=0,
)
define("MODEL.LOSSES.TRI.NORM_FEAT", False, "Triplet loss: on L2-normalized features.")
define(
    "MODEL.LOSSES.TRI.HARD_MINING",
    False,
    "Triplet loss: the hardest positive and negative of each anchor; off weighs "
    "all of them by the softmax of their distances.",
)
define(
    "MODEL.LOSSES.TRI.WEIGHTING",
    "softmax",
    "Triplet loss without HARD_MINING: a softmax over the distances (Ye et al. 2020, arXiv:2001.04193), or FastReID's "
    "form of it, whose weighted negative distance is wrong beyond distances of about 14 and falls to 0.",
    choices=("softmax", "fastreid"),
)
define("MODEL.LOSSES.TRI.SCALE", 1.0, "Triplet loss: weight in the sum.", low=0)
define("MODEL.LOSSES.CIRCLE.MARGIN", 0.25, "Circle loss: relaxation of the cosine similarities.", low=0)
define("MODEL.LOSSES.CIRCLE.GAMMA", 128, "Circle loss: factor on the similarities.", above=0)
define("MODEL.LOSSES.CIRCLE.SCALE", 1.0, "Circle loss: weight in the sum.", low=0)
define("MODEL.LOSSES.COSFACE.MARGIN", 0.25, "Pairwise CosFace: margin on the cosine similarities.", low=0)
define("MODEL.LOSSES.COSFACE.GAMMA", 128, "Pairwise CosFace: factor on the similarities.", above=0)
define("MODEL.LOSSES.COSFACE.SCALE", 1.0, "Pairwise CosFace: weight in the sum.", low=0)
define("MODEL.LOSSES.CENTER.SCALE", 0.0005, "Center loss: weight in the sum.", low=0)
define(
    "MODEL.LOSSES.CENTER.LR", 0.5, "Center loss: learning rate of the centers, which have an SGD of their own.", low=0
)
define("MODEL.LOSSES.FL.ALPHA", 0.25, "Focal loss: factor that balances the classes.", above=0)
define("MODEL.LOSSES.FL.GAMMA", 2, "Focal loss: exponent that turns the weight away from easy samples.", low=0)
define("MODEL.LOSSES.FL.SCALE", 1.0, "Focal loss: weight in the sum.", low=0)
define("MODEL.LOSSES.SUPCON.TEMPERATURE", 0.1, "Supervised contrastive loss: cosines are divided by it.", above=0)
define("MODEL.LOSSES.SUPCON.SCALE", 1.0, "Supervised contrastive loss: weight in the sum.", low=0)
define(
    "MODEL.LOSSES.PML.ARGS",
    {},
    "Losses of pytorch-metric-learning: arguments by the name of the loss or miner, e.g. "
    "{TripletMarginLoss: {margin: 0.1}}.",
    nested=True,
)
define("MODEL.LOSSES.PML.MINER", "", "Losses of pytorch-metric-learning: its miner that chooses pairs; '' is none.")
define("MODEL.LOSSES.PML.SCALE", 1.0, "Losses of pytorch-metric-learning: weight in the sum of each.", low=0)

# ---- knowledge distillation
define("KD.MODEL_CONFIG", (), "Distiller: config files of the teachers.", of=str)
define("KD.MODEL_WEIGHTS", (), "Distiller: weight files of the teachers, in the order of MODEL_CONFIG.", of=str)
define("KD.EMA.ENABLED", False, "Distiller: also learn from a moving average of the student itself.")
define("KD.EMA.MOMENTUM", 0.999, "Distiller: share of that average that each iteration keeps.", low=0, high=1)

# ---- input
define(
    "INPUT.SIZE_TRAIN",
    (256, 128),
    "Size that training images are resized to, in pixels: (height, width); (shorter_side,) keeps the aspect ratio; "
    "(0,) does not resize. One number needs INPUT.CROP, or images of one size.",
    low=0,
    high=8192,
    forms="(height, width), (shorter_side,) or (0,)",
)
define(
    "INPUT.SIZE_TEST",
    (256, 128),
    "Size that test images are resized to, in pixels, given as SIZE_TRAIN; with INPUT.CROP their center is then cut "
    "out.",
    low=0,
    high=8192,
    forms="(height, width), (shorter_side,) or (0,)",
)
define(
    "INPUT.MAX_PIXELS",
    100_000_000,
    "Largest image that is decoded, width x height; a larger one is an error. Decoding takes up to 17 bytes a pixel.",
    low=1,
    high=178_956_970,
)
define(
    "INPUT.INTERPOLATION",
    "bicubic",
    "Interpolation by which images are resized, as by Pillow: bicubic and bilinear are antialiased. FastReID uses "
    "bicubic, torchreid bilinear.",
    choices=("bicubic", "bilinear", "nearest"),
)
define(
    "INPUT.INTERPOLATION_TEST",
    "same",
    "Interpolation of test images, in evaluation, extraction and export: same is INPUT.INTERPOLATION. TransReID trains "
    "with bicubic and tests with bilinear.",
    choices=("same", "bicubic", "bilinear", "nearest"),
)
define(
    "INPUT.CHANNELS",
    3,
    "Channels that images are read with: 1 is grey, 3 RGB, 4 RGBA, whose fourth (a mask, infrared, ...) is 255 where a "
    "file has none.",
    choices=(1, 3, 4),
)
define("INPUT.FLIP.ENABLED", False, "Mirror training images left to right at random.")
define("INPUT.FLIP.PROB", 0.5, "Probability of mirroring an image.", low=0, high=1)
define("INPUT.PADDING.ENABLED", False, "Pad training images, then cut them back to their size at random.")
define(
    "INPUT.PADDING.MODE",
    "constant",
    "What the padding holds: black, the edge repeated, or a mirror image.",
    choices=("constant", "edge", "reflect", "symmetric"),
)
define("INPUT.PADDING.SIZE", 10, "Padding on each side, in pixels.", low=0, high=8192)
define(
    "INPUT.CROP.ENABLED",
    False,
    "Crop images to CROP.SIZE, after resizing to SIZE_TRAIN or SIZE_TEST: a random part, resized, in training; the "
    "center, not resized, in evaluation, extraction and export.",
)
define(
    "INPUT.CROP.SIZE",
    (224, 224),
    "Size of the crop in pixels: (height, width), or (side,) of a square.",
    low=1,
    high=8192,
    forms="(height, width) or (side,)",
)
define(
    "INPUT.CROP.SCALE",
    (0.16, 1),
    "Smallest and largest fraction of the image's area that a random crop covers.",
    above=0,
    high=1,
    length=2,
)
define(
    "INPUT.CROP.RATIO",
    (0.75, 1.3333333333333333),
    "Smallest and largest width / height of a random crop.",
    above=0,
    length=2,
)
define("INPUT.REA.ENABLED", False, "Random erasing: paint over a random rectangle of training images.")
define("INPUT.REA.PROB", 0.5, "Probability of erasing in an image.", low=0, high=1)
define(
    "INPUT.REA.VALUE",
    (123.675, 116.28, 103.53),
    "Colour of the rectangle, in 0..255: INPUT.CHANNELS values, or three of RGB, which for grey images become their "
    "luma.",
    low=0,
    high=255,
)
define("INPUT.CJ.ENABLED", False, "Colour jitter on training images; a fourth channel is left alone.")
define("INPUT.CJ.PROB", 0.5, "Probability of jittering an image.", low=0, high=1)
define("INPUT.CJ.BRIGHTNESS", 0.15, "Largest relative change of brightness.", low=0)
define("INPUT.CJ.CONTRAST", 0.15, "Largest relative change of contrast.", low=0)
define("INPUT.CJ.SATURATION", 0.1, "Largest relative change of saturation.", low=0)
define("INPUT.CJ.HUE", 0.1, "Largest turn of the hue, as a share of the colour circle.", low=0, high=0.5)
define("INPUT.AFFINE.ENABLED", False, "Random small rotation, shift, scaling and shear of training images.")
define("INPUT.AUTOAUG.ENABLED", False, "AutoAugment with the ImageNet policy, for grey and RGB images.")
define("INPUT.AUTOAUG.PROB", 0.0, "Probability of applying AutoAugment to an image.", low=0, high=1)
define("INPUT.AUGMIX.ENABLED", False, "AugMix: mix an image with augmented copies of it.")
define("INPUT.AUGMIX.PROB", 0.0, "Probability of applying AugMix to an image.", low=0, high=1)
define("INPUT.RPT.ENABLED", False, "Random patch: paste a part of another image of the batch over a training image.")
define("INPUT.RPT.PROB", 0.5, "Probability of pasting into an image.", low=0, high=1)
define("INPUT.RANDAUG.ENABLED", False, "RandAugment: random operations of one strength, for grey and RGB images.")
define("INPUT.RANDAUG.PROB", 1.0, "Probability of applying RandAugment to an image.", low=0, high=1)
define("INPUT.RANDAUG.NUM_OPS", 2, "Operations on an image, one after the other.", low=1)
define("INPUT.RANDAUG.MAGNITUDE", 9, "Strength of the operations, of 30 at most.", low=0, high=30)
define("INPUT.GREY.ENABLED", False, "Take the colour out of training images at random.")
define("INPUT.GREY.PROB", 0.1, "Probability of a grey image.", low=0, high=1)
define("INPUT.BLUR.ENABLED", False, "Blur training images by a Gaussian at random.")
define("INPUT.BLUR.PROB", 0.5, "Probability of blurring an image.", low=0, high=1)
define("INPUT.BLUR.KERNEL_SIZE", 5, "Size of the kernel in pixels, odd.", low=1)
define("INPUT.BLUR.SIGMA", (0.1, 2.0), "Smallest and largest standard deviation in pixels.", above=0, length=2)
define(
    "INPUT.AUGMENT_ON",
    "worker",
    "Where images are augmented: in the processes that load them, or on the device that trains.",
    choices=("worker", "device"),
)
define("INPUT.LOCAL_GREY.ENABLED", False, "Take the colour out of a random rectangle of training images.")
define("INPUT.LOCAL_GREY.PROB", 0.4, "Probability of a rectangle in an image.", low=0, high=1)

# ---- data
define(
    "DATASETS.NAMES", ("Market1501",), "Data sets to train on, together: registered names, csv:FILE or folder:FOLDER."
)
define("DATASETS.TESTS", ("Market1501",), "Data sets to evaluate on, one after the other.")
define(
    "DATASETS.FOLDER.CAMERA",
    "",
    "For folder: data sets, a regular expression whose first group is the camera in a file's name; empty for none.",
)
define(
    "DATASETS.FOLDER.TEST_FRACTION", 0.5, "For folder: data sets, the share of identities for testing.", low=0, high=1
)
define("DATASETS.FOLDER.SEED", 0, "For folder: data sets, the seed by which identities are divided.", low=0)
define("DATASETS.COMBINEALL", False, "Train on the query and gallery images too; the test results then mean nothing.")
define("DATASETS.MARKET1501_500K", False, "Market1501: add the 500k distractors of its folder images to the gallery.")
define(
    "DATASETS.MSMT17.VERSION",
    "auto",
    "MSMT17: V1, V2 (faces masked), or auto: V1 where both are.",
    choices=("auto", "V1", "V2"),
)
define(
    "DATASETS.MSMT17.VALIDATION",
    False,
    "MSMT17: train on list_val.txt too, as TransReID; FastReID does so under COMBINEALL alone, which always does.",
)
define("DATASETS.CUHK03.LABELED", False, "CUHK03: people cut out by hand; off takes those that a detector found.")
define(
    "DATASETS.CUHK03.CLASSIC",
    False,
    "CUHK03: the 20 classic splits, with 100 test identities each; off is the new protocol, 767 and 700 identities.",
)
define("DATASETS.CUHK03.SPLIT", 0, "CUHK03: which of the classic splits; the new protocol has one, 0.", low=0, high=19)
define("DATASETS.VIPER.SPLIT", 0, "VIPeR: which of the ten random halves of the identities trains.", low=0, high=9)
define(
    "DATASETS.VERI.VIEWS",
    False,
    "VeRi: read the views of keypoint_{train,test}.txt, for MODEL.BACKBONE.SIE_VIEWS 8; images that are not listed "
    "there are left out, as TransReID does.",
)
define(
    "DATASETS.VEHICLEID.SEED",
    0,
    "VehicleID: seed of the gallery, one drawn image of each test identity.",
    low=0,
    high=2**32 - 1,
)
define(
    "DATALOADER.SAMPLER_TRAIN",
    "TrainingSampler",
    "How batches are drawn: TrainingSampler (any image), ImbalancedDatasetSampler (each identity equally often), or "
    "NaiveIdentitySampler, BalancedIdentitySampler, SetReWeightSampler (NUM_INSTANCE images of each identity).",
)
define("DATALOADER.NUM_INSTANCE", 4, "Images of one identity in a batch, for the identity samplers.", low=1)
define(
    "DATALOADER.NUM_WORKERS",
    8,
    "Processes that load training images, a rank; no more than the cores at hand are "
    "started, 0 loads in the trainer's own.",
    low=0,
)
define(
    "DATALOADER.SET_WEIGHT",
    (),
    "Relative weight of each set of DATASETS.NAMES in a batch, for SetReWeightSampler.",
    of=float,
)
define(
    "DATALOADER.CACHE",
    "none",
    "Images decoded and resized once: kept on disk for later runs too, or in memory while a run uses them.",
    choices=("none", "ram", "disk"),
)
define(
    "DATALOADER.CACHE_DIR",
    "",
    "Folder of the cache on disk; empty is .fastamp-cache in the data root, or ~/.cache/fastamp if that is read-only.",
)
define(
    "DATALOADER.ON_CORRUPT",
    "error",
    "A training image that cannot be read stops the training, or another one of its identity takes its place.",
    choices=("error", "skip"),
)

# ---- solver
define("SOLVER.MAX_EPOCH", 120, "Length of the training, in epochs.", low=1)
define("SOLVER.IMS_PER_BATCH", 64, "Images of one training batch, over all ranks.", low=1)
define(
    "SOLVER.TRAINER",
    "auto",
    "Training loop: auto (AMPTrainer when SOLVER.AMP is on, else SimpleTrainer), or one that a project registered.",
)
define(
    "SOLVER.ACCUM_STEPS",
    1,
    "Batches whose gradients are averaged for one optimizer step, which is one iteration; an epoch's last step may "
    "have fewer.",
    low=1,
)
define("SOLVER.OPT", "Adam", "Optimizer: the name of a class in torch.optim, or LAMB (needs timm).")
define(
    "SOLVER.OPT_ARGS",
    {},
    "Further keyword arguments of the optimizer, e.g. {betas: [0.9, 0.98], eps: 1.0e-6}; "
    "given whole it replaces what a base file gave, SOLVER.OPT_ARGS.eps changes one.",
)
define("SOLVER.BASE_LR", 3e-4, "Learning rate between warm-up and decay.", low=0)
define(
    "SOLVER.LR_SCALING",
    "none",
    "How BASE_LR and ETA_MIN_LR grow with the batch of a step, IMS_PER_BATCH x ACCUM_STEPS, over REFERENCE_BATCH: not, "
    "in proportion (for SGD: Goyal et al. 2017, arXiv:1706.02677), or by its square root (for Adam and its like: "
    "Malladi et al. 2022, arXiv:2205.10287). Warm-up and MODEL.LOSSES.CENTER.LR stay as they are.",
    choices=("none", "linear", "sqrt"),
)
define("SOLVER.REFERENCE_BATCH", 64, "LR_SCALING: images of the step that BASE_LR is meant for.", low=1)
define("SOLVER.HEADS_LR_FACTOR", 1.0, "Factor on the learning rate of the heads.", low=0)
define("SOLVER.BIAS_LR_FACTOR", 1.0, "Factor on the learning rate of biases.", low=0)
define(
    "SOLVER.LR_FACTORS",
    {},
    "Factors on the learning rate by globs over parameter names, e.g. {'backbone.layer1.*': 0.1}; all that match are "
    "multiplied. Given whole it replaces what a base file gave.",
)
define("SOLVER.MOMENTUM", 0.9, "Momentum of SGD; other optimizers take theirs from OPT_ARGS.", low=0)
define("SOLVER.NESTEROV", False, "Nesterov's momentum for SGD.")
define("SOLVER.WEIGHT_DECAY", 0.0005, "Weight decay.", low=0)
define("SOLVER.WEIGHT_DECAY_NORM", 0.0005, "Weight decay of normalization layers' weights.", low=0)
define("SOLVER.WEIGHT_DECAY_BIAS", 0.0005, "Weight decay of biases, those of normalization layers included.", low=0)
define(
    "SOLVER.SCHED",
    "MultiStepLR",
    "Learning rate schedule: MultiStepLR, CosineAnnealingLR or ConstantLR by epochs after a warm-up; OneCycleLR by "
    "steps.",
)
define(
    "SOLVER.EPOCH_SCHEDULE",
    "after_warmup",
    "Which epochs STEPS and the cosine count: after_warmup those after "
    "warm-up and delay, as FastReID; absolute all of them.",
    choices=("after_warmup", "absolute"),
)
define("SOLVER.STEPS", (30, 55), "MultiStepLR: epochs after which the rate is multiplied by GAMMA.", low=0)
define("SOLVER.GAMMA", 0.1, "MultiStepLR: factor on the rate at each step.", low=0)
define(
    "SOLVER.LR_UPDATE",
    "mixed",
    "When the learning rate changes: mixed is each iteration during the warm-up and each epoch after it, as FastReID; "
    "iteration is each iteration, as FastReID v0.1.1; epoch is once an epoch, as FastReID v1.0.0, whose decay under "
    "EPOCH_SCHEDULE after_warmup counts from epoch max(warm-up + 1, DELAY_EPOCHS) on.",
    choices=("mixed", "iteration", "epoch"),
)
define(
    "SOLVER.DELAY_EPOCHS",
    0,
    "Epochs at the full rate before the decay starts, where EPOCH_SCHEDULE is after_warmup; where it is absolute, "
    "they delay only the cosine, and only under LR_UPDATE iteration.",
    low=0,
)
define("SOLVER.ETA_MIN_LR", 1e-7, "CosineAnnealingLR: rate at the end.", low=0)
define(
    "SOLVER.WARMUP_METHOD",
    "linear",
    "Course of the rate during warm-up: a line, a constant, or an exponential.",
    choices=("linear", "constant", "exp"),
)
define("SOLVER.WARMUP_ITERS", 1000, "Length of the warm-up, in iterations; 0 is none.", low=0)
define("SOLVER.WARMUP_EPOCHS", 0, "Length of the warm-up, in epochs; above 0 it replaces WARMUP_ITERS.", low=0)
define("SOLVER.WARMUP_FACTOR", 0.1, "Share of the rate that warm-up starts from.", low=0)
define("SOLVER.ONE_CYCLE.PCT_START", 0.3, "OneCycleLR: share of the steps until BASE_LR.", above=0, high=0.99)
define("SOLVER.ONE_CYCLE.DIV_FACTOR", 25.0, "OneCycleLR: the first rate is BASE_LR divided by this.", low=1)
define("SOLVER.ONE_CYCLE.FINAL_DIV_FACTOR", 1e4, "OneCycleLR: the last rate is the first divided by this.", low=1)
define(
    "SOLVER.FREEZE_ITERS",
    0,
    "Iterations at the start during which MODEL.FREEZE_LAYERS are frozen: no gradients, and normalization as in "
    "evaluation.",
    low=0,
)
define(
    "SOLVER.FREEZE_EPOCHS",
    0,
    "Epochs at the start during which MODEL.FREEZE_LAYERS are frozen; above 0 it replaces FREEZE_ITERS.",
    low=0,
)
define(
    "SOLVER.FREEZE_FC_ITERS",
    0,
    "Iterations at the end of the training during which the classifier's weights are frozen; 0 is none.",
    low=0,
)
define("SOLVER.EMA.ENABLED", False, "Keep an exponential moving average of the weights, in float32.")
define("SOLVER.EMA.DECAY", 0.999, "Share of the average that each optimizer step keeps.", low=0, high=0.999999)
define("SOLVER.EMA.EVALUATE", True, "Evaluate the average, and save it as the best model, instead of the weights.")
define(
    "SOLVER.SWA.ENABLED", False, "Average the weights at the ends of the last epochs; the last evaluation is of them."
)
define(
    "SOLVER.SWA.START_EPOCH", -1, "Epochs before those that are averaged; -1 is three quarters of MAX_EPOCH.", low=-1
)
define("SOLVER.SWA.PERIOD", 1, "Epochs between two weights that are averaged.", low=1)
define(
    "SOLVER.SWA.LR_FACTOR",
    0.0,
    "Share of BASE_LR that the rate stays at while weights are averaged; 0 goes on with the schedule.",
    low=0,
)
define("SOLVER.CHECKPOINT_PERIOD", 20, "Epochs between two checkpoints.", low=1)
define("SOLVER.CHECKPOINT_ITERS", 0, "Iterations between two checkpoints, beside those by epochs; 0 is none.", low=0)
define(
    "SOLVER.CHECKPOINT_MINUTES",
    0.0,
    "Minutes from one checkpoint to the next where none is due before, by the main process's clock; 0 is none.",
    low=0,
)
define(
    "SOLVER.CHECKPOINT_KEEP",
    0,
    "Periodic checkpoints (by epochs, iterations and minutes) that are kept, the newest; 0 keeps all. With 1, none is "
    "left to resume from when that one is damaged.",
    low=0,
)
define(
    "SOLVER.BEST_METRIC",
    "metric",
    "What model_best.pth is judged by at every evaluation: metric (the mean of mAP and Rank-1), mAP, mINP, Rank-5, "
    "TAR@FAR=0.001 or any other that is reported; the mean over DATASETS.TESTS, or that of one as <data set>/<metric>.",
)
define(
    "SOLVER.TF32",
    False,
    "Let CUDA compute float32 products in TensorFloat-32 (10 bits of mantissa); off means that "
    "what is called float32 is float32.",
)
define("SOLVER.CLIP_GRADIENTS.ENABLED", False, "Clip gradients before each step.")
define(
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
    "norm",
    "What is bounded: value each element, norm the norm of each "
    "parameter's gradient, global_norm the norm of all gradients together.",
    choices=("value", "norm", "global_norm"),
)
define("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 5.0, "The bound: largest absolute value, or largest norm.", above=0)
define("SOLVER.CLIP_GRADIENTS.NORM_TYPE", 2.0, "The p of the p-norm; .inf is the largest absolute value.", above=0)

define("SOLVER.AMP.ENABLED", False, "Mixed precision. SOLVER.AMP on, off, bf16 or fp16 is the short spelling.")
define(
    "SOLVER.AMP.DTYPE",
    "auto",
    "The low precision; auto takes bfloat16 where the device has it, else float16 with "
    "loss scaling on CUDA, else none.",
    choices=("auto", "bfloat16", "float16"),
    aliases={"bf16": "bfloat16", "fp16": "float16"},
)
define("SOLVER.AMP.INIT_SCALE", 65536.0, "Loss scale at the start (float16 only, as all of the scaling).", above=0)
define("SOLVER.AMP.GROWTH_FACTOR", 2.0, "Factor on the loss scale after GROWTH_INTERVAL good steps.", above=1)
define(
    "SOLVER.AMP.BACKOFF_FACTOR",
    0.5,
    "Factor on the loss scale after a step that overflowed and was skipped.",
    above=0,
    high=0.999,
)
define("SOLVER.AMP.GROWTH_INTERVAL", 2000, "Good steps in a row before the loss scale grows, in iterations.", low=1)
define("SOLVER.AMP.MIN_SCALE", 1.0, "Floor of the loss scale.", above=0)
define("SOLVER.AMP.MAX_SCALE", 2.0**24, "Ceiling of the loss scale.", above=0)
define(
    "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS",
    25,
    "Skipped steps in a row, in iterations, after which ON_FAILURE decides.",
    low=0,
)
define(
    "SOLVER.AMP.ON_FAILURE",
    "error",
    "When mixed precision cannot go on (see MAX_CONSECUTIVE_SKIPS): stop, or continue in that dtype, once.",
    choices=("error", "bfloat16", "float32"),
    aliases={"bf16": "bfloat16", "fp32": "float32"},
)
define(
    "SOLVER.AMP.FORCE_FP32",
    (),
    "Modules that always compute in float32: globs of module names, or class names.",
    of=str,
)
define(
    "SOLVER.AMP.PREFLIGHT",
    "error",
    "A trial of the first batch before the first step, with AMP on or off; when it fails: warn, stop (error), or train "
    "in bfloat16 where that is native, else in float32 (fallback).",
    choices=("off", "warn", "error", "fallback"),
)
define(
    "SOLVER.AMP.EVAL_DTYPE",
    "same",
    "Precision of evaluation: same as training, or float32.",
    choices=("same", "float32"),
    aliases={"fp32": "float32"},
)
define(
    "SOLVER.AMP.BN_GUARD",
    True,
    "Restore the buffers of normalization layers, memory banks and moving averages when a step is skipped.",
)
define(
    "SOLVER.AMP.LOCATE",
    "on_failure",
    "Search for the first module that made a non-finite value, and write OUTPUT_DIR/amp_crash/, when AMP fails.",
    choices=("on_failure", "off"),
)
# ---- evaluation
define("TEST.EVAL_PERIOD", 20, "Epochs between two evaluations; the last epoch always has one.", low=1)
define("TEST.IMS_PER_BATCH", 64, "Images of one test batch, over all ranks.", low=1)
define("TEST.NUM_WORKERS", -1, "Processes that load test images, a rank; -1 is as DATALOADER.NUM_WORKERS.", low=-1)
define("TEST.METRIC", "cosine", "Distance that ranks the gallery.", choices=("cosine", "euclidean"))
define("TEST.FLIP.ENABLED", False, "Average the features of each image and of its mirror image.")
define(
    "TEST.FLOORS",
    False,
    "Also rank by raw pixels and by colour histograms, and print both as floors beside the result.",
)
define(
    "TEST.PROTOCOL",
    "market1501",
    "What counts as a match: market1501 leaves out images of the query's identity from its own camera; no_camera "
    "leaves out nothing; cuhk03 is market1501 with the CMC over one drawn gallery image of each identity; vehicleid "
    "draws one gallery image of each identity from all images, and the others are the queries.",
    choices=("market1501", "no_camera", "cuhk03", "vehicleid"),
)
define("TEST.REPEATS", 10, "Draws of the gallery under PROTOCOL cuhk03 and vehicleid.", low=1)
define("TEST.SEED", 0, "Seed of the evaluation's draws; SEED has no part in them, so that runs are comparable.", low=0)
define(
    "TEST.AP",
    "standard",
    "Average precision: standard is the mean of the precisions at the matches; trapezoid is that of the first "
    "Market-1501 evaluation code, which also leaves out gallery images of identity -1.",
    choices=("standard", "trapezoid"),
)
define("TEST.RANKS", (1, 5, 10), "Ranks of the CMC to report; 1, 5 and 10 always are.", low=1)
define("TEST.BOOTSTRAP", 1000, "Resamples of the queries for 95 % intervals of mAP and Rank-1; 0 is none.", low=0)
define(
    "TEST.REPORT",
    False,
    "Write OUTPUT_DIR/report.html after each evaluation: results, curves, rank lists, mixed precision, in one file; "
    "--eval-only in a training's folder writes report_eval.html instead.",
)
define("TEST.PER_QUERY", False, "Keep each query's AP, INP and first match in OUTPUT_DIR/evaluation/<set>.")
define("TEST.MEMORY_BUDGET_MB", 256, "MiB of distances held at once; with less, evaluation takes longer.", low=1)
define(
    "TEST.KNN_BACKEND",
    "auto",
    "What searches neighbours for AQE and RERANK, with the same result: torch (auto), or faiss.",
    choices=("auto", "torch", "faiss"),
)
define("TEST.ROC.ENABLED", False, "Also report verification: the true accept rate at given false accept rates.")
define("TEST.ROC.FAR", (1e-4, 1e-3, 1e-2), "False accept rates to report, as shares.", above=0, high=1)
define("TEST.AQE.ENABLED", False, "Average query expansion: replace a feature by a mean of its nearest neighbours.")
define("TEST.AQE.ALPHA", 3.0, "Query expansion: exponent of the similarity that weighs a neighbour; any real number.")
define("TEST.AQE.QE_TIME", 1, "Query expansion: rounds.", low=1)
define("TEST.AQE.QE_K", 5, "Query expansion: neighbours in the mean, the feature itself among them.", low=1)
define(
    "TEST.AQE.SIDES",
    "both",
    "Query expansion: both expands queries and gallery by neighbours among both, as FastReID; query expands queries by "
    "the gallery, gallery the gallery by itself.",
    choices=("both", "query", "gallery"),
)
define("TEST.RERANK.ENABLED", False, "Re-ranking by k-reciprocal neighbours.")
define("TEST.RERANK.K1", 20, "Re-ranking: neighbours that must be reciprocal.", low=1)
define("TEST.RERANK.K2", 6, "Re-ranking: neighbours in the local query expansion; 1 leaves it out.", low=1)
define("TEST.RERANK.LAMBDA", 0.3, "Re-ranking: share of the original distance in the final one.", low=0, high=1)
define(
    "TEST.RERANK.FORM",
    "zhong",
    "Re-ranking: zhong is the authors' form; torchreid squares its distances once more; fastreid is FastReID's present "
    "one, with k1 instead of k1 + 1 neighbours and unscaled distances.",
    choices=("zhong", "torchreid", "fastreid"),
)
define(
    "TEST.PRECISE_BN.ENABLED", False, "Estimate batch norm statistics anew, with weights at rest, before evaluation."
)
define("TEST.PRECISE_BN.DATASET", "Market1501", "Precise batch norm: data set whose training images are run through.")
define("TEST.PRECISE_BN.NUM_ITER", 300, "Precise batch norm: batches that are run through the model.", low=1)

# FastReID's old spellings, each with the key below the same section that is meant.
RENAMED = {"SOLVER.AMP_ENABLED": "SOLVER.AMP.ENABLED"}
# Sections that take a bare value in their place: it goes to this key, and the section is enabled.
SHORTHANDS = {"SOLVER.AMP": "DTYPE"}
