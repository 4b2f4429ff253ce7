"""Evaluation: TEST."""

from fastamp.config.key import Key

KEYS = (
    Key("TEST.EVAL_PERIOD", 20, "Epochs between two evaluations; the last epoch always has one.", low=1),
    Key("TEST.IMS_PER_BATCH", 64, "Images of one test batch, over all ranks.", low=1),
    Key("TEST.NUM_WORKERS", -1, "Processes that load test images, a rank; -1 is as DATALOADER.NUM_WORKERS.", low=-1),
    Key("TEST.METRIC", "cosine", "Distance that ranks the gallery.", choices=("cosine", "euclidean")),
    Key("TEST.FLIP.ENABLED", False, "Average the features of each image and of its mirror image."),
    Key(
        "TEST.BASELINES",
        False,
        "Also rank by raw pixels and by colour histograms, and print both as floors beside the result.",
    ),
    "TEST.PROTOCOL",
    Key("TEST.NUM_TRIALS", 10, "Draws of the gallery under PROTOCOL cuhk03 and vehicleid.", low=1),
    Key(
        "TEST.SEED", 0, "Seed of the evaluation's draws; SEED has no part in them, so that runs are comparable.", low=0
    ),
    Key(
        "TEST.AP_METHOD",
        "standard",
        "Average precision: standard is the mean of the precisions at the matches; trapezoid is that of the first "
        "Market-1501 evaluation code, which also leaves out gallery images of identity -1.",
        choices=("standard", "trapezoid"),
    ),
    Key("TEST.RANKS", (1, 5, 10), "Ranks of the CMC to report; 1, 5 and 10 always are.", low=1),
    Key("TEST.BOOTSTRAP", 1000, "Resamples of the queries for 95 % intervals of mAP and Rank-1; 0 is none.", low=0),
    Key(
        "TEST.REPORT",
        False,
        "Write OUTPUT_DIR/report.html after each evaluation: results, curves, rank lists, mixed precision, in one "
        "file; --eval-only in a training's folder writes report_eval.html instead.",
    ),
    Key("TEST.PER_QUERY", False, "Keep each query's AP, INP and first match in OUTPUT_DIR/evaluation/<set>."),
    Key("TEST.MEMORY_BUDGET_MB", 256, "MiB of distances held at once; with less, evaluation takes longer.", low=1),
    Key(
        "TEST.KNN_BACKEND",
        "auto",
        "What searches neighbours for AQE and RERANK, with the same result: torch (auto), or faiss.",
        choices=("auto", "torch", "faiss"),
    ),
    Key("TEST.ROC.ENABLED", False, "Also report verification: the true accept rate at given false accept rates."),
    Key("TEST.ROC.FAR", (1e-4, 1e-3, 1e-2), "False accept rates to report, as shares.", above=0, high=1),
    Key("TEST.AQE.ENABLED", False, "Average query expansion: replace a feature by a mean of its nearest neighbours."),
    Key("TEST.AQE.ALPHA", 3.0, "Query expansion: exponent of the similarity that weighs a neighbour; any real number."),
    Key("TEST.AQE.QE_TIME", 1, "Query expansion: rounds.", low=1),
    Key("TEST.AQE.QE_K", 5, "Query expansion: neighbours in the mean, the feature itself among them.", low=1),
    Key(
        "TEST.AQE.TARGET",
        "both",
        "Query expansion: both expands queries and gallery by neighbours among both, as FastReID; query expands "
        "queries by the gallery, gallery the gallery by itself.",
        choices=("both", "query", "gallery"),
    ),
    Key("TEST.RERANK.ENABLED", False, "Re-ranking by k-reciprocal neighbours."),
    Key("TEST.RERANK.K1", 20, "Re-ranking: neighbours that must be reciprocal.", low=1),
    Key("TEST.RERANK.K2", 6, "Re-ranking: neighbours in the local query expansion; 1 leaves it out.", low=1),
    Key("TEST.RERANK.LAMBDA", 0.3, "Re-ranking: share of the original distance in the final one.", low=0, high=1),
    Key(
        "TEST.RERANK.VARIANT",
        "zhong",
        "Re-ranking: zhong is the authors' form; torchreid squares its distances once more; fastreid is FastReID's "
        "present one, with k1 instead of k1 + 1 neighbours and unscaled distances.",
        choices=("zhong", "torchreid", "fastreid"),
    ),
    Key(
        "TEST.PRECISE_BN.ENABLED",
        False,
        "Estimate batch norm statistics anew, with weights at rest, before evaluation.",
    ),
    Key("TEST.PRECISE_BN.DATASET", "Market1501", "Precise batch norm: data set whose training images are run through."),
    Key("TEST.PRECISE_BN.NUM_ITER", 300, "Precise batch norm: batches that are run through the model.", low=1),
)
