"""Short runs of projects/Unsupervised on the tiny demo dataset."""

import tiny

RUN = ("PROJECTS", "[Unsupervised]", "MODEL.HEADS.NAME", "ClusterHead", "MODEL.HEADS.NECK_FEAT", "after",
       "MODEL.LOSSES.NAME", "[ClusterContrastLoss]", "SOLVER.TRAINER", "ClusterTrainer", "DATALOADER.SAMPLER_TRAIN",
       "ClusterSampler", "UNSUPERVISED.ITERS_PER_EPOCH", "4", "UNSUPERVISED.K1", "6", "UNSUPERVISED.K2", "2",
       "UNSUPERVISED.EPS", "0.6", "UNSUPERVISED.MIN_SAMPLES", "2", "SOLVER.MAX_EPOCH", "3", "TEST.REPORT", "False",
       "TEST.BASELINES", "False", "TEST.BOOTSTRAP", "0", "TEST.EVAL_PERIOD", "3")  # fmt: skip
METHODS = {
    "cluster contrast": (),
    "spcl": ("MODEL.LOSSES.NAME", "[HybridMemoryLoss]", "UNSUPERVISED.EPS_GAP", "0.02"),
    "cap": ("MODEL.LOSSES.NAME", "[CameraProxyLoss]", "UNSUPERVISED.INTER_CAMERA.START_EPOCH", "1"),
}


def trainer_of(folder, *opts):
    """Build the trainer of a run in ``folder``, which continues if the folder exists."""
    return tiny.trainer_of(folder, *RUN, *opts)


def write_table(folder, name, *, identities):
    """Write a CSV file of the training images of the tiny demo dataset; return its name as a dataset."""
    images = sorted((folder / "data").glob("*/bounding_box_train/*.jpg"))
    rows = [
        f"{path},{path.name[:4] if identities else 'unknown'},{path.name.split('_c')[1][0]},train" for path in images
    ]
    (folder / name).write_text("\n".join(["path,pid,camid,split", *rows]) + "\n")
    return f"csv:{folder / name}"
