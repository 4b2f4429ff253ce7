"""Take steps with Partial FC in several processes: partial_fc_ranks.py OUTPUT_DIR PROCESSES LAYER RATE CLIP [FILE].

With FILE, the steps continue from the state in it. The images are divided unevenly among the processes. Rank 0 saves
the losses, the parameters, the optimizer state and the gradient norms to OUTPUT_DIR/PROCESSES.pth.
"""

import functools
import sys
from pathlib import Path

import torch
from forked import run_forked
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep
from fastamp.checkpoint.shards import full_state_dict, load_full_state
from fastamp.modeling.heads import EmbeddingHead
from fastamp.modeling.losses import LOSS_REGISTRY
from fastamp.solver import OptimizerState
from fastamp.solver.clip import clip_gradients
from fastamp.utils import comm

CLASSES, IMAGES, WIDTH, STEPS = 30, 12, 8, 3


class Model(nn.Module):
    """Linear layer and head on vectors."""

    def __init__(self, layer: str, rate: float | None) -> None:
        super().__init__()
        self.backbone = nn.Linear(5, WIDTH)
        self.heads = EmbeddingHead(
            feat_dim=WIDTH,
            num_classes=CLASSES,
            cls_layer=layer,
            scale=2,  # larger logits of Linear reach the smallest probability, 1e-30
            margin=0.3,
            with_bnneck=False,
            pool_layer="Identity",
            sample_rate=rate,
        )
        self.loss = LOSS_REGISTRY.get("CrossEntropyLoss")()

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        vectors, targets = batch
        return {"loss_cls": self.loss(self.heads(self.backbone(vectors)[:, :, None, None], targets), targets)}


def rows_of_rank(number: int) -> slice:
    """Return this rank's images: one of two and three ranks has fewer."""
    ends = {1: (0, 12), 2: (0, 7, 12), 3: (0, 5, 9, 12), 4: (0, 3, 7, 9, 12)}[comm.get_world_size()]
    return slice(ends[number], ends[number + 1])


def steps(folder: Path, layer: str, rate: str, clip: str, file: str = "") -> None:
    """Take the steps of this rank."""
    torch.manual_seed(0)
    model = Model(layer, None if rate == "full" else float(rate))
    draw = torch.Generator().manual_seed(1)
    shapes = {"backbone.weight": (WIDTH, 5), "backbone.bias": (WIDTH,), "heads.weight": (CLASSES, WIDTH)}
    load_full_state(model, {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if file:
        saved = torch.load(file, weights_only=True)
        load_full_state(model, saved["model"])
        OptimizerState(optimizer, model).load_state_dict(saved["optimizer"])
    clipping = None if clip == "none" else functools.partial(clip_gradients, clip_type=clip, clip_value=0.5)
    step = OptimizationStep(model, [optimizer], scaler=LossScaler(init_scale=1024.0), clip=clipping)
    parallel = comm.data_parallel(model)
    losses, norms = [], []
    for number in range(STEPS):
        step.zero_grad()
        for last in (False, True):
            vectors = torch.randn(IMAGES, 5, generator=draw)
            targets = torch.randint(CLASSES, (IMAGES,), generator=draw)
            if number == 1 and last:
                vectors[0] = torch.inf  # this step is skipped on all ranks
            rows = rows_of_rank(comm.get_rank())
            batch = (vectors[rows], targets[rows])
            if last:
                terms = parallel(batch)
                step.scale(terms, 0.5).backward()
            else:
                with comm.no_sync(parallel):
                    terms = parallel(batch)
                    step.scale(terms, 0.5).backward()
            losses.append(float(terms["loss_cls"]))
        verdict = step.finish()
        assert verdict.ok == (number != 1)
        norms.append((verdict.grad_norm, verdict.clip_coefficient))
    state = {"model": full_state_dict(model), "optimizer": OptimizerState(optimizer, model).state_dict()}
    if comm.is_main_process():
        torch.save(state | {"losses": losses, "norms": norms}, folder / f"{comm.get_world_size()}.pth")


if __name__ == "__main__":
    output, processes, *options = sys.argv[1:]
    if processes == "1":
        steps(Path(output), *options)
    else:
        run_forked(steps, int(processes), Path(output), Path(output), *options)
