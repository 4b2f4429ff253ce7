"""Config keys of the model and of knowledge distillation: the sections ``MODEL`` and ``KD``."""

from fastamp.config.key import Key

KEYS = (
    Key("MODEL.META_ARCHITECTURE", "Baseline", "Meta-architecture, which combines backbone, heads and losses."),
    Key("MODEL.DEVICE", "cuda", "Device: auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:N or mps."),
    Key(
        "MODEL.CHANNELS_LAST",
        "auto",
        "Channels-last memory format; auto enables it on CPU, and on CUDA with AMP.",
        choices=("auto", "on", "off"),
    ),
    Key(
        "MODEL.WEIGHTS",
        "",
        "Weights file for initialization or evaluation of the model, or zoo:NAME of `fastamp models`; '' for none.",
    ),
    Key(
        "MODEL.WEIGHTS_ACCEPT_WITHDRAWN",
        False,
        "Accept zoo:NAME of weights that were trained on images withdrawn by their owner (DukeMTMC).",
    ),
    Key(
        "MODEL.WEIGHTS_MIN_MATCH",
        0.9,
        "Minimum fraction of the backbone's tensors that a MODEL.WEIGHTS file must provide; fewer are an error.",
        low=0,
        high=1,
    ),
    Key(
        "MODEL.WEIGHTS_ALLOW_MISSING",
        False,
        "Evaluation, export and import: let learned tensors that a weights file lacks keep their initial values; "
        "False is an error. Training from MODEL.WEIGHTS only warns.",
    ),
    Key(
        "MODEL.COMPILE",
        "off",
        "Backend of torch.compile for MODEL.COMPILE_REGION; cudagraphs requires CUDA. Compilation takes minutes and is "
        "useful for long runs.",
        choices=("off", "inductor", "aot_eager", "cudagraphs"),
        aliases={"on": "inductor", "true": "inductor", "false": "off"},
    ),
    Key(
        "MODEL.COMPILE_REGION",
        "backbone",
        "What MODEL.COMPILE compiles: the backbone; the whole model with preprocessing, head and losses; or its "
        "repeated blocks, e.g. those of a transformer, one of which is compiled for all.",
        choices=("backbone", "model", "blocks"),
    ),
    Key(
        "MODEL.COMPILE_MODE",
        "default",
        "Mode of the backend inductor: reduce-overhead uses CUDA graphs, max-autotune also measures kernels.",
        choices=("default", "reduce-overhead", "max-autotune"),
    ),
    Key(
        "MODEL.FREEZE_LAYERS",
        (),
        "Modules that are frozen for the first SOLVER.FREEZE_ITERS iterations, e.g. backbone or backbone.layer1.",
        of=str,
    ),
    Key(
        "MODEL.PIXEL_MEAN",
        (123.675, 116.28, 103.53),
        "Mean of each channel, in 0..255, subtracted from every image: INPUT.CHANNELS values, or three RGB values, "
        "which are converted to luma for grayscale images.",
    ),
    Key(
        "MODEL.PIXEL_STD",
        (58.395, 57.120000000000005, 57.375),
        "Standard deviation of each channel, in 0..255; images are divided by it after MODEL.PIXEL_MEAN is subtracted. "
        "Same form as MODEL.PIXEL_MEAN.",
        above=0,
    ),
    "MODEL.QUEUE_SIZE",
    "MODEL.MOCO",
    Key("MODEL.BACKBONE.NAME", "build_resnet_backbone", "Backbone, which computes feature maps from images."),
    Key(
        "MODEL.BACKBONE.DEPTH",
        "50x",
        "Variant of the backbone: 18x, 34x, 50x, 101x, 152x of a ResNet; small, base, deit_small, deit_base of a ViT.",
    ),
    Key(
        "MODEL.BACKBONE.LAST_STRIDE",
        1,
        "Stride of the last stage; 1 instead of 2 doubles height and width of the last feature map.",
        low=1,
        high=2,
    ),
    "MODEL.BACKBONE.STEM_POOL",
    "MODEL.BACKBONE.STEM_RELU",
    Key(
        "MODEL.BACKBONE.FEAT_DIM",
        2048,
        "Number of channels of the last feature map. With MODEL.HEADS.POOL_LAYER Flatten, the width of the "
        "flattened map (channels x height x width) is also accepted, as in FastReID; the model is the same.",
        low=1,
    ),
    Key(
        "MODEL.BACKBONE.NORM",
        "BN",
        "Normalization layers of the backbone: BN, syncBN (statistics over all ranks, CUDA only), GN, or FrozenBN "
        "(fixed pretrained statistics).",
    ),
    Key(
        "MODEL.BACKBONE.WITH_IBN", False, "Instance norm on half of the channels in the first three stages (IBN-Net a)."
    ),
    Key("MODEL.BACKBONE.WITH_SE", False, "Add squeeze-and-excitation to every residual block."),
    Key("MODEL.BACKBONE.WITH_NL", False, "Non-local attention blocks in stages 2 and 3."),
    Key(
        "MODEL.BACKBONE.PRETRAIN",
        False,
        "Initialize the backbone with ImageNet weights: from PRETRAIN_PATH, else downloaded.",
    ),
    Key("MODEL.BACKBONE.PRETRAIN_PATH", "", "File with pretrained weights of the backbone; '' for none."),
    "MODEL.BACKBONE.STRIDE_SIZE",
    "MODEL.BACKBONE.SIE_CAMERAS",
    "MODEL.BACKBONE.SIE_VIEWS",
    "MODEL.BACKBONE.SIE_COE",
    "MODEL.BACKBONE.CHECKPOINTING",
    "MODEL.BACKBONE.DEPLOY",
    "MODEL.BACKBONE.DROP_PATH_RATIO",
    "MODEL.BACKBONE.DROP_RATIO",
    "MODEL.BACKBONE.ATT_DROP_RATE",
    "MODEL.LORA",
    Key("MODEL.HEADS.NAME", "EmbeddingHead", "Head, which computes features and class logits from feature maps."),
    Key(
        "MODEL.HEADS.POOL_LAYER",
        "GlobalAvgPool",
        "Pooling of the feature map to one vector per image: GlobalAvgPool, GlobalMaxPool, GeneralizedMeanPooling, "
        "GeneralizedMeanPoolingP (learned exponent), AdaptiveAvgMaxPool (sum), MaxAvgPool (max and average side by "
        "side, twice the width), ClipGlobalAvgPool, FastGlobalAvgPool, Flatten, Identity.",
    ),
    Key(
        "MODEL.HEADS.EMBEDDING_DIM",
        0,
        "Feature width, to which a 1x1 convolution maps MODEL.BACKBONE.FEAT_DIM; 0 omits the convolution. For FCHead, "
        "the width of the fully connected layer.",
        low=0,
    ),
    Key(
        "MODEL.HEADS.WITH_BNNECK",
        False,
        "Batch normalization, with its bias frozen at 0, between feature and classifier (BNNeck).",
    ),
    Key("MODEL.HEADS.NECK_BIAS", False, "Train the bias of the BNNeck instead of freezing it at 0."),
    Key("MODEL.HEADS.NORM", "BN", "Normalization layer of the BNNeck."),
    Key(
        "MODEL.HEADS.NECK_FEAT",
        "before",
        "Features for the metric losses: before or after the BNNeck.",
        choices=("before", "after"),
    ),
    Key(
        "MODEL.HEADS.EVAL_FEAT",
        "after",
        "Features for evaluation: after the BNNeck, as in FastReID, or before it, as in TransReID.",
        choices=("before", "after"),
    ),
    "MODEL.HEADS.TEMPORAL_POOL",
    "MODEL.HEADS.JPM",
    Key(
        "MODEL.HEADS.CLS_LAYER",
        "Linear",
        "Classifier: Linear, ArcSoftmax, CosSoftmax, CircleSoftmax, MonotonicArcSoftmax (ArcFace with a linear "
        "continuation), DetachedArcSoftmax (insightface's gradient of ArcFace) or SubCenterArcSoftmax (several centers "
        "per class, larger margins for rare classes).",
    ),
    "MODEL.HEADS.SUBCENTERS",
    "MODEL.HEADS.PFC",
    Key(
        "MODEL.HEADS.NUM_CLASSES",
        0,
        "Number of classes (identities); 0 means the number of identities in the training set.",
        low=0,
    ),
    Key(
        "MODEL.HEADS.MARGIN", 0.0, "Margin of a margin softmax: a cosine, or an angle in radians for ArcSoftmax.", low=0
    ),
    Key("MODEL.HEADS.SCALE", 1, "Scale of the classifier's logits; margin softmaxes need about 30 to 128.", above=0),
    Key(
        "MODEL.LOSSES.NAME",
        ("CrossEntropyLoss",),
        "Losses, which are summed: CrossEntropyLoss, FocalLoss, TripletLoss, CircleLoss, Cosface, CenterLoss, "
        "SupConLoss, or pml/ and the name of a loss of pytorch-metric-learning.",
    ),
    Key(
        "MODEL.LOSSES.GATHER",
        False,
        "With several ranks: compute triplet and pair losses over the images of all ranks instead of each rank's "
        "images, and average the cross entropy over all ranks.",
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
