"""Custom loss: a meta-architecture whose losses method calls a function."""

import torch
import torch.nn.functional as F
from fastreid.config import get_cfg
from fastreid.engine import DefaultTrainer, default_argument_parser, default_setup, launch
from fastreid.modeling.losses import *  # noqa: F403
from fastreid.modeling.losses.utils import concat_all_gather, euclidean_dist, normalize
from fastreid.modeling.meta_arch import META_ARCH_REGISTRY, Baseline
from fastreid.utils.events import get_event_storage


def contrastive_loss(embedding, targets, margin):
    embedding = normalize(embedding, axis=-1)
    all_embedding, all_targets = concat_all_gather(embedding.detach()), concat_all_gather(targets)
    dist_mat = euclidean_dist(embedding, all_embedding)
    same = targets.view(-1, 1).eq(all_targets.view(1, -1)).float()
    return (same * dist_mat.pow(2) + (1 - same) * F.relu(margin - dist_mat).pow(2)).mean()


@META_ARCH_REGISTRY.register()
class Contrastive(Baseline):
    def losses(self, outputs, gt_labels):
        logits = outputs["pred_class_logits"].detach()
        accuracy = (logits.argmax(1) == gt_labels).float().mean()
        get_event_storage().put_scalar("cls_accuracy", accuracy)
        return {
            "loss_cls": cross_entropy_loss(outputs["cls_outputs"], gt_labels, 0.1),  # noqa: F405
            "loss_contrastive": contrastive_loss(outputs["features"], gt_labels, 1.0),
        }


def main(args):
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.MODEL.META_ARCHITECTURE = "Contrastive"
    cfg.freeze()
    default_setup(cfg, args)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    assert torch.is_tensor(next(trainer.model.parameters()))
    return trainer.train()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
