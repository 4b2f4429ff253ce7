"""Custom hook, trainer and training data."""

import logging

import torch
from fastreid.config import get_cfg
from fastreid.data.build import _root, build_reid_train_loader
from fastreid.data.common import CommDataset
from fastreid.data.data_utils import read_image
from fastreid.data.datasets import DATASET_REGISTRY
from fastreid.data.transforms import build_transforms
from fastreid.engine import DefaultTrainer, default_argument_parser, default_setup, hooks, launch
from fastreid.engine.train_loop import HookBase
from fastreid.solver import build_optimizer
from fastreid.utils import comm
from fastreid.utils.file_io import PathManager
from fastreid.utils.logger import setup_logger

logger = logging.getLogger("fastreid.my_project")


class CountingDataset(CommDataset):
    def __getitem__(self, index):
        img_item = self.img_items[index]
        img_path, pid, camid = img_item[0], img_item[1], img_item[2]
        img = read_image(img_path)
        if self.transform is not None:
            img = self.transform(img)
        if self.relabel:
            pid = self.pid_dict[pid]
            camid = self.cam_dict[camid]
        return {"images": img, "targets": pid, "camids": camid, "img_paths": img_path, "lengths": len(img_path)}


class LossLogger(HookBase):
    def before_train(self):
        self.seen = []
        self.base_lr = self.trainer.cfg.SOLVER.BASE_LR

    def after_step(self):
        storage = self.trainer.storage
        storage.put_scalar("twice", 2.0 * storage.history("total_loss").latest(), smoothing_hint=False)
        self.seen.append(storage.iter)

    def after_train(self):
        print("STEPS", self.seen == list(range(self.trainer.max_iter)), "EPOCH", self.trainer.epoch)


class Trainer(DefaultTrainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.register_hooks([LossLogger()])

    @classmethod
    def build_train_loader(cls, cfg):
        logger.info("Prepare training set")
        train_items = []
        for d in cfg.DATASETS.NAMES:
            data = DATASET_REGISTRY.get(d)(root=_root)
            train_items.extend(data.train)
        transforms = build_transforms(cfg, is_train=True)
        train_set = CountingDataset([tuple(item)[:3] for item in train_items], transforms, relabel=True)
        return build_reid_train_loader(cfg, train_set=train_set)

    @classmethod
    def build_optimizer(cls, cfg, model):
        optimizer = build_optimizer(cfg, model)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    def build_hooks(self):
        ret = super().build_hooks()
        ret.append(hooks.EvalHook(1, lambda: print("EVALUATED") or {}))
        return ret

    def before_step(self):
        super().before_step()
        self.steps_begun = getattr(self, "steps_begun", 0) + 1

    def after_step(self):
        super().after_step()
        self.steps_ended = getattr(self, "steps_ended", 0) + 1


def main(args):
    setup_logger(name="fastreid.my_project")
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.freeze()
    default_setup(cfg, args)
    PathManager.mkdirs(cfg.OUTPUT_DIR)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    results = trainer.train()
    if comm.is_main_process():
        print("BEGUN", trainer.steps_begun, "ENDED", trainer.steps_ended, "ITER", trainer.iter, "mAP" in results)
    return results


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
