"""Config keys of training: the section ``SOLVER``, except for ``SOLVER.AMP``."""

from fastamp.config.key import Key

KEYS = (
    Key("SOLVER.MAX_EPOCH", 120, "Number of training epochs.", low=1),
    Key("SOLVER.IMS_PER_BATCH", 64, "Batch size in training: images per batch, over all ranks.", low=1),
    Key(
        "SOLVER.TRAINER",
        "auto",
        "Training loop: auto (AMPTrainer if SOLVER.AMP is on, else SimpleTrainer), or a registered custom trainer.",
    ),
    Key(
        "SOLVER.ACCUM_STEPS",
        1,
        "Gradient accumulation: number of batches whose gradients are averaged for an optimizer step, which is one "
        "iteration. The last step of an epoch may use fewer batches.",
        low=1,
    ),
    Key(
        "SOLVER.PROFILE",
        (),
        "First and last iteration, counted from 1, e.g. (101, 105), of which a trace of PyTorch's profiler, a table of "
        "operators and, on CUDA, a snapshot of the memory are written to OUTPUT_DIR/profile; at most 20 iterations. "
        "Empty: no profile.",
        of=int,
        low=1,
    ),
    Key("SOLVER.OPT", "Adam", "Optimizer: name of a class in torch.optim, or LAMB (requires timm)."),
    Key(
        "SOLVER.OPT_ARGS",
        {},
        "Additional keyword arguments of the optimizer, e.g. {betas: [0.9, 0.98], eps: 1.0e-6}. A section replaces "
        "the section of a base file; SOLVER.OPT_ARGS.eps sets one argument.",
    ),
    Key("SOLVER.BASE_LR", 3e-4, "Base learning rate, which applies between warm-up and decay.", low=0),
    Key(
        "SOLVER.LR_SCALING",
        "none",
        "Scaling of BASE_LR and ETA_MIN_LR with IMS_PER_BATCH x ACCUM_STEPS / REFERENCE_BATCH: none, linear (for "
        "SGD: Goyal et al. 2017, arXiv:1706.02677), or sqrt (for Adam and similar optimizers: Malladi et al. 2022, "
        "arXiv:2205.10287). Warm-up and MODEL.LOSSES.CENTER.LR are not scaled.",
        choices=("none", "linear", "sqrt"),
    ),
    Key(
        "SOLVER.REFERENCE_BATCH",
        64,
        "LR_SCALING: number of images per optimizer step for which BASE_LR was chosen.",
        low=1,
    ),
    Key("SOLVER.HEADS_LR_FACTOR", 1.0, "Learning-rate factor of the heads.", low=0),
    Key(
        "SOLVER.BIAS_LR_FACTOR",
        1.0,
        "Learning-rate factor of biases, also of relative position biases.",
        low=0,
    ),
    Key(
        "SOLVER.LR_FACTORS",
        {},
        "Factors of the learning rate by glob patterns of parameter names, e.g. {'backbone.layer1.*': 0.1}; all "
        "matching factors are multiplied. A section replaces the section of a base file.",
    ),
    Key(
        "SOLVER.LAYER_DECAY",
        1.0,
        "Layer-wise learning-rate decay d, in (0, 1], for pretrained backbones: factor of the learning rate per layer "
        "that follows. The heads and the final norm have 1, the last of L blocks d, the first one d^L, the embeddings "
        "d^(L + 1). 1 disables it.",
        above=0,
        high=1,
    ),
    Key("SOLVER.MOMENTUM", 0.9, "Momentum of SGD; other optimizers use OPT_ARGS.", low=0),
    Key("SOLVER.NESTEROV", False, "Nesterov momentum for SGD."),
    Key("SOLVER.WEIGHT_DECAY", 0.0005, "Weight decay.", low=0),
    Key("SOLVER.WEIGHT_DECAY_NORM", 0.0005, "Weight decay of the weights of normalization layers.", low=0),
    Key("SOLVER.WEIGHT_DECAY_BIAS", 0.0005, "Weight decay of biases, including those of normalization layers.", low=0),
    Key(
        "SOLVER.SCHED",
        "MultiStepLR",
        "Learning-rate schedule: MultiStepLR, CosineAnnealingLR or ConstantLR by epochs after a warm-up; "
        "RampedExponentialLR by epochs: linear warm-up, then times GAMMA per epoch; OneCycleLR by iterations.",
    ),
    Key(
        "SOLVER.SCHEDULE_STRIDE",
        1,
        "RampedExponentialLR: epochs of the schedule per epoch of the training; 2 reproduces MiewID's program, which "
        "steps it twice.",
        low=1,
    ),
    Key(
        "SOLVER.EPOCH_SCHEDULE",
        "after_warmup",
        "Start of the epoch count of STEPS and the cosine schedule: the end of warm-up and delay (after_warmup, as in "
        "FastReID), or the start of the training (absolute).",
        choices=("after_warmup", "absolute"),
    ),
    Key("SOLVER.STEPS", (30, 55), "MultiStepLR: epochs after which the learning rate is multiplied by GAMMA.", low=0),
    Key("SOLVER.GAMMA", 0.1, "MultiStepLR, RampedExponentialLR: factor of the learning rate at each step.", low=0),
    Key(
        "SOLVER.LR_UPDATE",
        "mixed",
        "Interval of learning-rate updates: every iteration (iteration, as in FastReID v0.1.1), every epoch (epoch, as "
        "in FastReID v1.0.0), or every iteration during warm-up and every epoch after it (mixed, as in current "
        "FastReID). With LR_UPDATE=epoch and EPOCH_SCHEDULE=after_warmup, the decay counts from max(warm-up + 1, "
        "DELAY_EPOCHS).",
        choices=("mixed", "iteration", "epoch"),
    ),
    Key(
        "SOLVER.DELAY_EPOCHS",
        0,
        "Number of epochs at the full learning rate before the decay. With EPOCH_SCHEDULE=absolute, only the cosine "
        "schedule is delayed, and only with LR_UPDATE=iteration.",
        low=0,
    ),
    Key("SOLVER.ETA_MIN_LR", 1e-7, "CosineAnnealingLR and RampedExponentialLR: lowest learning rate.", low=0),
    Key(
        "SOLVER.WARMUP_METHOD",
        "linear",
        "Warm-up of the learning rate: linear, constant or exponential.",
        choices=("linear", "constant", "exp"),
    ),
    Key("SOLVER.WARMUP_ITERS", 1000, "Length of the warm-up, in iterations; 0 disables it.", low=0),
    Key("SOLVER.WARMUP_EPOCHS", 0, "Length of the warm-up, in epochs; if positive, it replaces WARMUP_ITERS.", low=0),
    Key(
        "SOLVER.WARMUP_FACTOR",
        0.1,
        "Learning rate at the start of the warm-up, as a fraction of the full learning rate.",
        low=0,
    ),
    Key(
        "SOLVER.ONE_CYCLE.PCT_START",
        0.3,
        "OneCycleLR: fraction of the iterations in which the learning rate rises to BASE_LR.",
        above=0,
        high=0.99,
    ),
    Key("SOLVER.ONE_CYCLE.DIV_FACTOR", 25.0, "OneCycleLR: the initial learning rate is BASE_LR / DIV_FACTOR.", low=1),
    Key(
        "SOLVER.ONE_CYCLE.FINAL_DIV_FACTOR",
        1e4,
        "OneCycleLR: the final learning rate is the initial learning rate / FINAL_DIV_FACTOR.",
        low=1,
    ),
    Key(
        "SOLVER.FREEZE_ITERS",
        0,
        "Iterations at the start during which MODEL.FREEZE_LAYERS are frozen: no gradients, and normalization as "
        "in evaluation.",
        low=0,
    ),
    Key(
        "SOLVER.FREEZE_EPOCHS",
        0,
        "Epochs at the start during which MODEL.FREEZE_LAYERS are frozen; -1 means the whole training. If not 0, it "
        "replaces FREEZE_ITERS.",
        low=-1,
    ),
    Key(
        "SOLVER.FREEZE_FC_ITERS",
        0,
        "Iterations at the end during which the classifier weights are frozen; 0 disables it.",
        low=0,
    ),
    Key("SOLVER.EMA.ENABLED", False, "Keep an exponential moving average (EMA) of the weights, in float32."),
    Key("SOLVER.EMA.DECAY", 0.999, "Decay of the EMA per optimizer step.", low=0, high=0.999999),
    Key(
        "SOLVER.EMA.WARMUP",
        True,
        "Increase the decay of the EMA from 0 in the first steps, so that short runs do not keep the initial weights.",
    ),
    Key(
        "SOLVER.EMA.EVALUATE",
        True,
        "Evaluate the EMA weights, and save them as model_best.pth, instead of the trained weights.",
    ),
    Key(
        "SOLVER.SWA.ENABLED",
        False,
        "Stochastic weight averaging (SWA): average the weights at the ends of the last epochs; the last "
        "evaluation uses the average.",
    ),
    Key(
        "SOLVER.SWA.START_EPOCH",
        -1,
        "Epochs before averaging starts; -1 means three quarters of MAX_EPOCH.",
        low=-1,
    ),
    Key("SOLVER.SWA.PERIOD", 1, "Averaging interval, in epochs.", low=1),
    Key(
        "SOLVER.SWA.INITIAL_WEIGHT",
        0.0,
        "Fraction of the weights at the start of training in the final average; 0.5 keeps more of what a pretrained "
        "model has learned (WiSE-FT, Wortsman et al. 2022), and 1 keeps the initial weights.",
        low=0,
        high=1,
    ),
    Key(
        "SOLVER.SWA.LR_FACTOR",
        0.0,
        "Constant learning rate during averaging, as a fraction of BASE_LR; 0 keeps the schedule.",
        low=0,
    ),
    Key("SOLVER.CHECKPOINT_PERIOD", 20, "Checkpoint interval, in epochs.", low=1),
    Key("SOLVER.CHECKPOINT_ITERS", 0, "Interval of additional checkpoints, in iterations; 0 disables them.", low=0),
    Key(
        "SOLVER.CHECKPOINT_MINUTES",
        0.0,
        "Maximum time between checkpoints, in minutes, by the clock of the main process; 0 disables it.",
        low=0,
    ),
    Key(
        "SOLVER.CHECKPOINT_KEEP",
        0,
        "Number of newest periodic checkpoints to keep, including those by iterations and minutes; 0 keeps all. With "
        "1, the run cannot be resumed if that checkpoint is damaged.",
        low=0,
    ),
    Key(
        "SOLVER.BEST_METRIC",
        "metric",
        "Metric that selects model_best.pth at each evaluation: metric (the mean of mAP and Rank-1), mAP, mINP, "
        "Rank-5, TAR@FAR=0.001 or any other reported metric, averaged over DATASETS.TESTS; <dataset>/<metric> uses "
        "one dataset.",
    ),
    Key(
        "SOLVER.TF32",
        False,
        "Allow TensorFloat-32 (10-bit mantissa) for float32 matrix products and convolutions on CUDA; if off, float32 "
        "is computed in full precision. Replaces PyTorch's own settings, e.g. torch.backends.fp32_precision.",
    ),
    "SOLVER.CLIP_GRADIENTS",
)
