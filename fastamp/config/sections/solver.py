"""Training: SOLVER, other than SOLVER.AMP."""

from fastamp.config.key import Key

KEYS = (
    Key("SOLVER.MAX_EPOCH", 120, "Length of the training, in epochs.", low=1),
    Key("SOLVER.IMS_PER_BATCH", 64, "Images of one training batch, over all ranks.", low=1),
    Key(
        "SOLVER.TRAINER",
        "auto",
        "Training loop: auto (AMPTrainer when SOLVER.AMP is on, else SimpleTrainer), or one that a project registered.",
    ),
    Key(
        "SOLVER.ACCUM_STEPS",
        1,
        "Batches whose gradients are averaged for one optimizer step, which is one iteration; an epoch's last step may "
        "have fewer.",
        low=1,
    ),
    Key("SOLVER.OPT", "Adam", "Optimizer: the name of a class in torch.optim, or LAMB (needs timm)."),
    Key(
        "SOLVER.OPT_ARGS",
        {},
        "Further keyword arguments of the optimizer, e.g. {betas: [0.9, 0.98], eps: 1.0e-6}; "
        "given whole it replaces what a base file gave, SOLVER.OPT_ARGS.eps changes one.",
    ),
    Key("SOLVER.BASE_LR", 3e-4, "Learning rate between warm-up and decay.", low=0),
    Key(
        "SOLVER.LR_SCALING",
        "none",
        "How BASE_LR and ETA_MIN_LR grow with the batch of a step, IMS_PER_BATCH x ACCUM_STEPS, over REFERENCE_BATCH: "
        "not, in proportion (for SGD: Goyal et al. 2017, arXiv:1706.02677), or by its square root (for Adam and its "
        "like: Malladi et al. 2022, arXiv:2205.10287). Warm-up and MODEL.LOSSES.CENTER.LR stay as they are.",
        choices=("none", "linear", "sqrt"),
    ),
    Key("SOLVER.REFERENCE_BATCH", 64, "LR_SCALING: images of the step that BASE_LR is meant for.", low=1),
    Key("SOLVER.HEADS_LR_FACTOR", 1.0, "Factor on the learning rate of the heads.", low=0),
    Key("SOLVER.BIAS_LR_FACTOR", 1.0, "Factor on the learning rate of biases.", low=0),
    Key(
        "SOLVER.LR_FACTORS",
        {},
        "Factors on the learning rate by globs over parameter names, e.g. {'backbone.layer1.*': 0.1}; all that match "
        "are multiplied. Given whole it replaces what a base file gave.",
    ),
    Key("SOLVER.MOMENTUM", 0.9, "Momentum of SGD; other optimizers take theirs from OPT_ARGS.", low=0),
    Key("SOLVER.NESTEROV", False, "Nesterov's momentum for SGD."),
    Key("SOLVER.WEIGHT_DECAY", 0.0005, "Weight decay.", low=0),
    Key("SOLVER.WEIGHT_DECAY_NORM", 0.0005, "Weight decay of normalization layers' weights.", low=0),
    Key("SOLVER.WEIGHT_DECAY_BIAS", 0.0005, "Weight decay of biases, those of normalization layers included.", low=0),
    Key(
        "SOLVER.SCHED",
        "MultiStepLR",
        "Learning rate schedule: MultiStepLR, CosineAnnealingLR or ConstantLR by epochs after a warm-up; OneCycleLR by "
        "steps.",
    ),
    Key(
        "SOLVER.EPOCH_SCHEDULE",
        "after_warmup",
        "Which epochs STEPS and the cosine count: after_warmup those after "
        "warm-up and delay, as FastReID; absolute all of them.",
        choices=("after_warmup", "absolute"),
    ),
    Key("SOLVER.STEPS", (30, 55), "MultiStepLR: epochs after which the rate is multiplied by GAMMA.", low=0),
    Key("SOLVER.GAMMA", 0.1, "MultiStepLR: factor on the rate at each step.", low=0),
    Key(
        "SOLVER.LR_UPDATE",
        "mixed",
        "When the learning rate changes: mixed is each iteration during the warm-up and each epoch after it, as "
        "FastReID; iteration is each iteration, as FastReID v0.1.1; epoch is once an epoch, as FastReID v1.0.0, whose "
        "decay under EPOCH_SCHEDULE after_warmup counts from epoch max(warm-up + 1, DELAY_EPOCHS) on.",
        choices=("mixed", "iteration", "epoch"),
    ),
    Key(
        "SOLVER.DELAY_EPOCHS",
        0,
        "Epochs at the full rate before the decay starts, where EPOCH_SCHEDULE is after_warmup; where it is absolute, "
        "they delay only the cosine, and only under LR_UPDATE iteration.",
        low=0,
    ),
    Key("SOLVER.ETA_MIN_LR", 1e-7, "CosineAnnealingLR: rate at the end.", low=0),
    Key(
        "SOLVER.WARMUP_METHOD",
        "linear",
        "Course of the rate during warm-up: a line, a constant, or an exponential.",
        choices=("linear", "constant", "exp"),
    ),
    Key("SOLVER.WARMUP_ITERS", 1000, "Length of the warm-up, in iterations; 0 is none.", low=0),
    Key("SOLVER.WARMUP_EPOCHS", 0, "Length of the warm-up, in epochs; above 0 it replaces WARMUP_ITERS.", low=0),
    Key("SOLVER.WARMUP_FACTOR", 0.1, "Share of the rate that warm-up starts from.", low=0),
    Key("SOLVER.ONE_CYCLE.PCT_START", 0.3, "OneCycleLR: share of the steps until BASE_LR.", above=0, high=0.99),
    Key("SOLVER.ONE_CYCLE.DIV_FACTOR", 25.0, "OneCycleLR: the first rate is BASE_LR divided by this.", low=1),
    Key("SOLVER.ONE_CYCLE.FINAL_DIV_FACTOR", 1e4, "OneCycleLR: the last rate is the first divided by this.", low=1),
    Key(
        "SOLVER.FREEZE_ITERS",
        0,
        "Iterations at the start during which MODEL.FREEZE_LAYERS are frozen: no gradients, and normalization as in "
        "evaluation.",
        low=0,
    ),
    Key(
        "SOLVER.FREEZE_EPOCHS",
        0,
        "Epochs at the start during which MODEL.FREEZE_LAYERS are frozen; above 0 it replaces FREEZE_ITERS.",
        low=0,
    ),
    Key(
        "SOLVER.FREEZE_FC_ITERS",
        0,
        "Iterations at the end of the training during which the classifier's weights are frozen; 0 is none.",
        low=0,
    ),
    Key("SOLVER.EMA.ENABLED", False, "Keep an exponential moving average of the weights, in float32."),
    Key("SOLVER.EMA.DECAY", 0.999, "Share of the average that each optimizer step keeps.", low=0, high=0.999999),
    Key("SOLVER.EMA.EVALUATE", True, "Evaluate the average, and save it as the best model, instead of the weights."),
    Key(
        "SOLVER.SWA.ENABLED",
        False,
        "Average the weights at the ends of the last epochs; the last evaluation is of them.",
    ),
    Key(
        "SOLVER.SWA.START_EPOCH",
        -1,
        "Epochs before those that are averaged; -1 is three quarters of MAX_EPOCH.",
        low=-1,
    ),
    Key("SOLVER.SWA.PERIOD", 1, "Epochs between two weights that are averaged.", low=1),
    Key(
        "SOLVER.SWA.LR_FACTOR",
        0.0,
        "Share of BASE_LR that the rate stays at while weights are averaged; 0 goes on with the schedule.",
        low=0,
    ),
    Key("SOLVER.CHECKPOINT_PERIOD", 20, "Epochs between two checkpoints.", low=1),
    Key("SOLVER.CHECKPOINT_ITERS", 0, "Iterations between two checkpoints, beside those by epochs; 0 is none.", low=0),
    Key(
        "SOLVER.CHECKPOINT_MINUTES",
        0.0,
        "Minutes from one checkpoint to the next where none is due before, by the main process's clock; 0 is none.",
        low=0,
    ),
    Key(
        "SOLVER.CHECKPOINT_KEEP",
        0,
        "Periodic checkpoints (by epochs, iterations and minutes) that are kept, the newest; 0 keeps all. With 1, "
        "none is left to resume from when that one is damaged.",
        low=0,
    ),
    Key(
        "SOLVER.BEST_METRIC",
        "metric",
        "What model_best.pth is judged by at every evaluation: metric (the mean of mAP and Rank-1), mAP, mINP, "
        "Rank-5, TAR@FAR=0.001 or any other that is reported; the mean over DATASETS.TESTS, or that of one as <data "
        "set>/<metric>.",
    ),
    Key(
        "SOLVER.TF32",
        False,
        "Let CUDA compute float32 products in TensorFloat-32 (10 bits of mantissa); off means that "
        "what is called float32 is float32.",
    ),
    "SOLVER.CLIP_GRADIENTS",
)
