"""Config keys of evaluation: the section ``TEST``."""

from fastamp.config.key import Key

KEYS = (
    Key("TEST.EVAL_PERIOD", 20, "Evaluation interval, in epochs; the last epoch is always evaluated.", low=1),
    Key("TEST.EVAL_START", False, "Also evaluate before the first step."),
    Key(
        "TEST.ALL_SPLITS",
        False,
        "Evaluate all random splits of the test set, VIPeR also in both directions, and report mean and standard "
        "deviation. A model trained on the dataset is evaluated only on its own split.",
    ),
    Key("TEST.IMS_PER_BATCH", 64, "Batch size in evaluation: images per batch, over all ranks.", low=1),
    Key("TEST.NUM_WORKERS", -1, "Worker processes per rank for test images; -1 means DATALOADER.NUM_WORKERS.", low=-1),
    Key("TEST.METRIC", "cosine", "Distance by which the gallery images are ranked.", choices=("cosine", "euclidean")),
    Key("TEST.FLIP.ENABLED", False, "Average the features of each image and its horizontal flip."),
    Key(
        "TEST.BASELINES",
        False,
        "Also rank by raw pixels and by color histograms, and print both baselines next to the result.",
    ),
    "TEST.PROTOCOL",
    Key("TEST.NUM_TRIALS", 10, "Number of trials of the protocols that draw random galleries or queries.", low=1),
    Key(
        "TEST.SEED",
        0,
        "Seed of all random draws in evaluation; independent of the seed of training (SEED), so that the results of "
        "several runs are comparable.",
        low=0,
    ),
    Key(
        "TEST.AP_METHOD",
        "standard",
        "Average precision: standard is the mean of the precision at each match; trapezoid is the rule of the "
        "first Market-1501 evaluation code, which also excludes gallery images of identity -1.",
        choices=("standard", "trapezoid"),
    ),
    Key("TEST.RANKS", (1, 5, 10), "Ranks of the CMC to report; 1, 5 and 10 are always included.", low=1),
    Key(
        "TEST.BOOTSTRAP",
        1000,
        "Bootstrap resamples of the queries for 95 % confidence intervals of mAP and Rank-1; 0 disables the intervals.",
        low=0,
    ),
    Key(
        "TEST.GROUP_BY",
        "",
        "Also report the metrics of the queries with each value of this column of the test set, e.g. species, or "
        "camera, and the error rates of a calibrated model; empty for no groups.",
    ),
    Key(
        "TEST.REPORT",
        False,
        "Write OUTPUT_DIR/report.html after each evaluation: results, curves, rank lists and mixed precision in "
        "one file. --eval-only in the folder of a training run writes report_eval.html instead.",
    ),
    Key(
        "TEST.PER_QUERY",
        False,
        "Write AP, INP and the rank of the first match of each query to OUTPUT_DIR/evaluation/<dataset>.",
    ),
    Key("TEST.MEMORY_BUDGET_MB", 256, "Memory for distances, in MiB; a smaller budget makes evaluation slower.", low=1),
    Key(
        "TEST.KNN_BACKEND",
        "auto",
        "Backend of the nearest-neighbor search of AQE and RERANK: torch (auto) or faiss; results are the same.",
        choices=("auto", "torch", "faiss"),
    ),
    Key(
        "TEST.ROC.ENABLED",
        False,
        "Also report verification: true accept rates at the false accept rates in TEST.ROC.FAR.",
    ),
    Key("TEST.ROC.FAR", (1e-4, 1e-3, 1e-2), "False accept rates to report, as fractions.", above=0, high=1),
    Key(
        "TEST.AQE.ENABLED",
        False,
        "Average query expansion: replace a feature by a weighted mean of its nearest neighbors.",
    ),
    Key("TEST.AQE.ALPHA", 3.0, "Query expansion: each neighbor is weighted by its similarity to the power ALPHA."),
    Key("TEST.AQE.QE_TIME", 1, "Query expansion: number of rounds.", low=1),
    Key("TEST.AQE.QE_K", 5, "Query expansion: number of neighbors in the mean, including the feature itself.", low=1),
    Key(
        "TEST.AQE.TARGET",
        "both",
        "Query expansion: both expands queries and gallery by neighbors from both, as in FastReID; query expands "
        "queries by gallery images; gallery expands gallery images by gallery images.",
        choices=("both", "query", "gallery"),
    ),
    Key("TEST.RERANK.ENABLED", False, "Re-rank by k-reciprocal neighbors."),
    Key(
        "TEST.RERANK.K1",
        20,
        "Re-ranking: number of nearest neighbors among which reciprocal neighbors are searched.",
        low=1,
    ),
    Key("TEST.RERANK.K2", 6, "Re-ranking: number of neighbors in the local query expansion; 1 disables it.", low=1),
    Key("TEST.RERANK.LAMBDA", 0.3, "Re-ranking: weight of the original distance in the final distance.", low=0, high=1),
    Key(
        "TEST.RERANK.VARIANT",
        "zhong",
        "Re-ranking: zhong is the authors' code; torchreid squares the distances once more; fastreid is the "
        "current FastReID code, with k1 instead of k1 + 1 neighbors and unscaled distances.",
        choices=("zhong", "torchreid", "fastreid"),
    ),
    Key(
        "TEST.PRECISE_BN.ENABLED",
        False,
        "Recompute batch norm statistics with fixed weights before each evaluation.",
    ),
    Key("TEST.PRECISE_BN.DATASET", "Market1501", "Precise batch norm: dataset whose training images are used."),
    Key("TEST.PRECISE_BN.NUM_ITER", 300, "Precise batch norm: number of batches.", low=1),
)
