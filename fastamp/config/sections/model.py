"""The model: MODEL and KD."""

from fastamp.config.key import Key

KEYS = (
    Key("MODEL.META_ARCHITECTURE", "Baseline", "The whole model: how backbone, heads and losses are put together."),
    Key("MODEL.DEVICE", "cuda", "Where to compute: auto (CUDA, else MPS, else the CPU), cpu, cuda, cuda:N or mps."),
    Key(
        "MODEL.CHANNELS_LAST",
        "auto",
        "Keep the channels of a feature map next to each other in memory; auto is on for a CPU, and for CUDA under "
        "AMP.",
        choices=("auto", "on", "off"),
    ),
    Key("MODEL.WEIGHTS", "", "File whose weights the whole model starts from, or is evaluated with; '' is none."),
    Key(
        "MODEL.WEIGHTS_MIN_MATCH",
        0.9,
        "Share of the backbone's tensors that a MODEL.WEIGHTS file must provide, else it is refused.",
        low=0,
        high=1,
    ),
    Key(
        "MODEL.COMPILE",
        "off",
        "Compile the backbone by torch.compile with this backend; it takes minutes, and pays on a GPU where runs are "
        "long.",
        choices=("off", "inductor", "aot_eager", "cudagraphs"),
        aliases={"on": "inductor", "true": "inductor", "false": "off"},
    ),
    Key(
        "MODEL.FREEZE_LAYERS",
        (),
        "Names of the model's parts, e.g. backbone or backbone.layer1, that stand still for SOLVER.FREEZE_ITERS.",
        of=str,
    ),
    Key(
        "MODEL.PIXEL_MEAN",
        (123.675, 116.28, 103.53),
        "Mean of each channel, in 0..255, taken off every image: INPUT.CHANNELS values, or three of RGB, which for "
        "grey images become their luma.",
    ),
    Key(
        "MODEL.PIXEL_STD",
        (58.395, 57.120000000000005, 57.375),
        "Standard deviation of each channel, in 0..255, that images are divided by; given as PIXEL_MEAN is.",
        above=0,
    ),
    "MODEL.QUEUE_SIZE",
    "MODEL.MOCO",
    Key("MODEL.BACKBONE.NAME", "build_resnet_backbone", "The network that turns images into feature maps."),
    Key(
        "MODEL.BACKBONE.DEPTH",
        "50x",
        "Variant of the backbone: 18x, 34x, 50x, 101x, 152x of a ResNet; small, base, deit_small, deit_base of a ViT.",
    ),
    Key(
        "MODEL.BACKBONE.LAST_STRIDE",
        1,
        "Stride of the last stage; 1 keeps a feature map twice as large as 2 does.",
        low=1,
        high=2,
    ),
    "MODEL.BACKBONE.STEM_POOL",
    Key(
        "MODEL.BACKBONE.FEAT_DIM",
        2048,
        "Channels of the backbone's last feature map. With MODEL.HEADS.POOL_LAYER Flatten the width of the flattened "
        "map, channels x height x width, is accepted too, as in FastReID; the model is the same.",
        low=1,
    ),
    Key(
        "MODEL.BACKBONE.NORM",
        "BN",
        "Normalization layers of the backbone: BN, syncBN (statistics over all ranks, CUDA only), GN, or FrozenBN, "
        "which stays as it was pretrained.",
    ),
    Key(
        "MODEL.BACKBONE.WITH_IBN", False, "Instance norm on half of the channels in the first three stages (IBN-Net a)."
    ),
    Key("MODEL.BACKBONE.WITH_SE", False, "Squeeze-and-excitation in every block."),
    Key("MODEL.BACKBONE.WITH_NL", False, "Non-local attention blocks in stages 2 and 3."),
    Key("MODEL.BACKBONE.PRETRAIN", False, "Start from ImageNet weights: PRETRAIN_PATH's, or else downloaded ones."),
    Key("MODEL.BACKBONE.PRETRAIN_PATH", "", "File with pretrained weights of the backbone; '' is none."),
    "MODEL.BACKBONE.STRIDE_SIZE",
    "MODEL.BACKBONE.SIE_CAMERAS",
    "MODEL.BACKBONE.SIE_VIEWS",
    "MODEL.BACKBONE.SIE_COE",
    "MODEL.BACKBONE.CHECKPOINTING",
    "MODEL.BACKBONE.DEPLOY",
    "MODEL.BACKBONE.DROP_PATH_RATIO",
    "MODEL.BACKBONE.DROP_RATIO",
    "MODEL.BACKBONE.ATT_DROP_RATE",
    Key("MODEL.HEADS.NAME", "EmbeddingHead", "The part that turns feature maps into features and class logits."),
    Key(
        "MODEL.HEADS.POOL_LAYER",
        "GlobalAvgPool",
        "Pooling of the feature map to one vector an image: GlobalAvgPool, GlobalMaxPool, GeneralizedMeanPooling, "
        "GeneralizedMeanPoolingP (learned exponent), AdaptiveAvgMaxPool, ClipGlobalAvgPool, FastGlobalAvgPool, "
        "Flatten, Identity.",
    ),
    Key(
        "MODEL.HEADS.EMBEDDING_DIM",
        0,
        "Width that a 1x1 convolution reduces the feature to, 0 keeps FEAT_DIM; of FCHead, the width of its layer.",
        low=0,
    ),
    Key(
        "MODEL.HEADS.WITH_BNNECK", False, "Batch normalization with a bias frozen at 0 between feature and classifier."
    ),
    Key("MODEL.HEADS.NORM", "BN", "Normalization layer of that neck."),
    Key(
        "MODEL.HEADS.NECK_FEAT",
        "before",
        "Which feature the metric losses see: before or after the neck.",
        choices=("before", "after"),
    ),
    Key(
        "MODEL.HEADS.EVAL_FEAT",
        "after",
        "Which feature evaluation takes: after the neck, as FastReID, or before it, as TransReID.",
        choices=("before", "after"),
    ),
    "MODEL.HEADS.JPM",
    Key("MODEL.HEADS.CLS_LAYER", "Linear", "Classifier: Linear, ArcSoftmax, CosSoftmax or CircleSoftmax."),
    Key(
        "MODEL.HEADS.NUM_CLASSES",
        0,
        "Identities that the classifier tells apart; 0 counts those of the training set.",
        low=0,
    ),
    Key(
        "MODEL.HEADS.MARGIN", 0.0, "Margin of a margin softmax: a cosine, or an angle in radians for ArcSoftmax.", low=0
    ),
    Key("MODEL.HEADS.SCALE", 1, "Factor on the classifier's logits; margin softmaxes need about 30 to 128.", above=0),
    Key(
        "MODEL.LOSSES.NAME",
        ("CrossEntropyLoss",),
        "The losses, which are added up: CrossEntropyLoss, FocalLoss, TripletLoss, CircleLoss, Cosface, CenterLoss, "
        "SupConLoss, or pml/ and the name of one of pytorch-metric-learning's.",
    ),
    Key(
        "MODEL.LOSSES.GATHER",
        False,
        "Among several processes: let the triplet and pair losses compare the images of all, not of each process's "
        "share, and the cross entropy average over those of all.",
    ),
    "MODEL.LOSSES.CE",
    "MODEL.LOSSES.TRI",
    "MODEL.LOSSES.CIRCLE",
    "MODEL.LOSSES.COSFACE",
    "MODEL.LOSSES.CENTER",
    "MODEL.LOSSES.FL",
    "MODEL.LOSSES.SUPCON",
    "MODEL.LOSSES.PML",
    "KD",
)
