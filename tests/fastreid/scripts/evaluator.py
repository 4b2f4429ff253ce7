"""Custom evaluator: the trainer returns the loader and the evaluator of each test set."""

import copy
from collections import OrderedDict

import torch
from fastreid.config import get_cfg
from fastreid.data import build_reid_test_loader
from fastreid.engine import DefaultTrainer, default_argument_parser, default_setup, launch
from fastreid.evaluation import ReidEvaluator, inference_on_dataset, print_csv_format
from fastreid.evaluation.evaluator import DatasetEvaluator
from fastreid.utils import comm
from fastreid.utils.checkpoint import Checkpointer


class Recall(DatasetEvaluator):
    def __init__(self, cfg, num_query, output_dir=None):
        self.cfg = cfg
        self._num_query = num_query
        self._output_dir = output_dir
        self.features = []
        self.pids = []

    def reset(self):
        self.features = []
        self.pids = []

    def process(self, inputs, outputs):
        self.pids.extend(inputs["targets"].tolist())
        self.features.append(outputs.cpu())

    def evaluate(self):
        if comm.get_world_size() > 1:
            comm.synchronize()
            features = comm.gather(self.features)
            features = [each for rank in features for each in rank]
            pids = [each for rank in comm.gather(self.pids) for each in rank]
            if not comm.is_main_process():
                return {}
        else:
            features, pids = self.features, self.pids
        features = torch.nn.functional.normalize(torch.cat(features), dim=1)
        pids = torch.tensor(pids)
        similarity = features @ features.t()
        similarity.fill_diagonal_(-1)
        recall = (pids[similarity.argmax(1)] == pids).float().mean() * 100
        self._results = OrderedDict()
        self._results["Recall@1"] = recall
        self._results["metric"] = recall
        return copy.deepcopy(self._results)


class Trainer(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_dir=None):
        data_loader, num_query = cls.build_test_loader(cfg, dataset_name)
        return data_loader, Recall(cfg, num_query, output_dir)


class Usual(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_dir=None):
        data_loader, evaluator = super().build_evaluator(cfg, dataset_name, output_dir)
        assert isinstance(evaluator, ReidEvaluator)
        return data_loader, evaluator


def main(args):
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.freeze()
    default_setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    results = trainer.train()
    print("RECALL", sorted(results))

    cfg.defrost()
    cfg.MODEL.BACKBONE.PRETRAIN = False
    cfg.MODEL.WEIGHTS = cfg.OUTPUT_DIR + "/model_final.pth"
    cfg.MODEL.HEADS.NUM_CLASSES = trainer.cfg.MODEL.HEADS.NUM_CLASSES
    model = Usual.build_model(cfg)
    Checkpointer(model).load(cfg.MODEL.WEIGHTS)
    print("USUAL", "mAP" in Usual.test(cfg, model))

    found = OrderedDict()
    for name in cfg.DATASETS.TESTS:
        loader, num_query = build_reid_test_loader(cfg, dataset_name=name)
        found[name] = inference_on_dataset(model, loader, Recall(cfg, num_query), flip_test=cfg.TEST.FLIP.ENABLED)
    print_csv_format(found)
    return results


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
