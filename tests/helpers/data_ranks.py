"""Build trainers in two processes whose data differ: data_ranks.py FOLDER. Rank r writes FOLDER/rank<r>.json."""

import json
import sys
from pathlib import Path

import tiny
from forked import run_forked

from fastamp.data.datasets import DATASET_REGISTRY, Demo, ImageDataset
from fastamp.engine import DefaultTrainer
from fastamp.utils import comm
from fastamp.utils.errors import DataError

CASES = ("equal", "order", "identity", "missing", "test set", "test column", "evaluation")


@DATASET_REGISTRY.register()
class PerRank(ImageDataset):
    """The images of ``Demo``; on rank 1, those of some splits differ as ``case`` says."""

    case = "equal"

    def __init__(self, root: str) -> None:
        demo = Demo(root)
        splits = {name: list(getattr(demo, name)) for name in ("train", "query", "gallery")}
        if comm.get_rank():
            self.change(splits)
        super().__init__(*splits.values())

    def change(self, splits: dict[str, list]) -> None:
        train, query, gallery = splits.values()
        if self.case == "order":
            train[3], train[30] = train[30], train[3]
        elif self.case == "identity":
            train[7] = train[7]._replace(pid=train[90].pid)
        elif self.case == "missing":
            del train[-1]
        elif self.case in ("test set", "evaluation"):
            gallery[2:] = gallery[:1:-1]
        elif self.case == "test column":
            query[1] = query[1]._replace(columns={"side": "left"})


def main(folder: str) -> None:
    found = {}
    for PerRank.case in CASES:
        cfg = tiny.tiny_config(Path(folder), "DATASETS.NAMES", "PerRank", "DATASETS.TESTS", "PerRank")
        case, PerRank.case = PerRank.case, "equal" if PerRank.case == "evaluation" else PerRank.case
        try:
            trainer = DefaultTrainer(cfg)
            if case == "evaluation":
                PerRank.case = case
                trainer.evaluate(DefaultTrainer._build_test_loaders(cfg))
            found[case] = ""
        except DataError as error:
            found[case] = str(error)
    (Path(folder) / f"rank{comm.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_forked(main, 2, Path(sys.argv[1]), sys.argv[1])
