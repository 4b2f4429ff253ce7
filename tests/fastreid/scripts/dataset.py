"""Custom dataset: a subclass of ImageDataset, registered by its class name."""

import glob
import os
import os.path as osp
import re

from fastreid.config import get_cfg
from fastreid.data.datasets import DATASET_REGISTRY
from fastreid.data.datasets.bases import ImageDataset
from fastreid.engine import DefaultTrainer, default_argument_parser, default_setup, launch


@DATASET_REGISTRY.register()
class MyShop(ImageDataset):
    dataset_dir = "my_shop"
    dataset_name = "myshop"

    def __init__(self, root="datasets", **kwargs):
        self.root = root
        self.dataset_dir = osp.join(self.root, self.dataset_dir)
        self.train_dir = osp.join(self.dataset_dir, "train")
        self.query_dir = osp.join(self.dataset_dir, "query")
        self.gallery_dir = osp.join(self.dataset_dir, "gallery")
        self.check_before_run([self.dataset_dir, self.train_dir, self.query_dir, self.gallery_dir])

        train = self.process_dir(self.train_dir, is_train=True)
        query = lambda: self.process_dir(self.query_dir)  # noqa: E731
        gallery = lambda: self.process_dir(self.gallery_dir)  # noqa: E731
        super().__init__(train, query, gallery, **kwargs)

    def process_dir(self, dir_path, is_train=False):
        data = []
        for img_path in sorted(glob.glob(osp.join(dir_path, "*.png"))):
            pid, camid = map(int, re.match(r"(\d+)_c(\d+)", osp.basename(img_path)).groups())
            if is_train:
                pid = self.dataset_name + "_" + str(pid)
                camid = self.dataset_name + "_" + str(camid)
            data.append((img_path, pid, camid))
        return data


def main(args):
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.DATASETS.NAMES = ("MyShop",)
    cfg.DATASETS.TESTS = ("MyShop",)
    cfg.freeze()
    default_setup(cfg, args)

    dataset = DATASET_REGISTRY.get("MyShop")(root=os.getenv("FASTREID_DATASETS", "datasets"))
    dataset.show_train()
    dataset.show_test()
    print("IDENTITIES", dataset.get_num_pids(dataset.train), "CAMERAS", dataset.get_num_cams(dataset.train))

    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(
        main,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )
