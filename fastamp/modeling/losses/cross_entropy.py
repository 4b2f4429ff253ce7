"""Cross-entropy loss over identities, with the label smoothing of FastReID."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.layers import PartialLogits
from fastamp.modeling.losses.build import LOSS_REGISTRY, ConfiguredLoss

KEYS = (
    Key(
        "MODEL.LOSSES.CE.EPSILON",
        0.0,
        "Cross entropy: label smoothing, i.e. the probability distributed over the other classes; a negative value "
        "selects adaptive smoothing (see ALPHA).",
        high=1,
    ),
    Key(
        "MODEL.LOSSES.CE.ALPHA",
        0.2,
        "Cross entropy: adaptive smoothing is ALPHA times the predicted probability of the target class.",
    ),
    Key(
        "MODEL.LOSSES.CE.SMOOTH_OVER",
        "others",
        "Cross entropy: classes over which EPSILON is distributed evenly: others, or all with the target class.",
        choices=("others", "all"),
    ),
    Key("MODEL.LOSSES.CE.SCALE", 1.0, "Cross entropy: weight in the total loss.", low=0),
)


@force_fp32
def cross_entropy_total(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    epsilon: float = 0.0,
    alpha: float = 0.2,
    smooth_over: str = "others",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sum of the cross entropies with smoothed labels, and the number of nonzero terms.

    Differs from PyTorch's label smoothing: the target class has probability 1 - eps and each of the K - 1 other classes
    eps / (K - 1). With ``smooth_over="all"``, eps is distributed over all K classes as in PyTorch (Szegedy et al. 2016,
    arXiv:1512.00567, section 7).

    Args:
        logits: (B, K) float.
        targets: (B,) int64 class labels in 0..K-1.
        epsilon: eps in 0..1; if negative, eps is ``alpha`` times the predicted probability of the target class. Default
            0.
        alpha: factor of the adaptive smoothing. Default 0.2.
        smooth_over: "others" (default) or "all".

    Returns:
        ``(sum, count)``, scalar float32 and () int64.
    """
    log_probabilities = F.log_softmax(logits, dim=1)
    right = log_probabilities.gather(1, targets[:, None]).squeeze(1)
    eps = alpha * right.detach().exp() if epsilon < 0 else epsilon
    classes = logits.shape[1]
    if smooth_over == "all":
        eps = eps * ((classes - 1) / classes)
    # max(): a single class has no other classes to smooth over.
    wrong = (log_probabilities.sum(1) - right) / max(classes - 1, 1)
    losses = -((1 - eps) * right + eps * wrong)
    return losses.sum(), torch.count_nonzero(losses.detach())


def cross_entropy_loss(
    logits: torch.Tensor, targets: torch.Tensor, epsilon: float = 0.0, alpha: float = 0.2
) -> torch.Tensor:
    """Compute the cross entropy with smoothed labels, averaged over the samples with nonzero loss.

    Args:
        logits, targets, epsilon, alpha: see ``cross_entropy_total``.

    Returns:
        Scalar float32.
    """
    total, count = cross_entropy_total(logits, targets, epsilon=epsilon, alpha=alpha)
    return total / count.clamp(min=1)


@LOSS_REGISTRY.register()
class CrossEntropyLoss(ConfiguredLoss):
    """Cross-entropy loss of the ``cls_outputs`` of a head; see ``cross_entropy_loss``.

    For ``PartialLogits`` (Partial FC), the loss is the mean over the images of all ranks, without label smoothing.

    Args:
        epsilon, alpha: see ``cross_entropy_total``.
        smooth_over: see ``cross_entropy_total``.
        scale: weight of this loss in the total loss.
    """

    loss_name = "loss_cls"
    section = "CE"
    indexes_classes = True

    def __init__(
        self, *, epsilon: float = 0.0, alpha: float = 0.2, smooth_over: str = "others", scale: float = 1.0
    ) -> None:
        super().__init__()
        self.epsilon, self.alpha, self.smooth_over, self.scale = epsilon, alpha, smooth_over, scale

    def total_and_count(
        self, outputs: dict[str, torch.Tensor], targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``(sum of the cross entropies, number of nonzero terms)``, () each; see ``compute_losses``."""
        options = {"epsilon": self.epsilon, "alpha": self.alpha, "smooth_over": self.smooth_over}
        total, count = cross_entropy_total(outputs["cls_outputs"], targets, **options)
        return self.scale * total, count

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        logits = outputs["cls_outputs"]
        if isinstance(logits, PartialLogits):
            return self.scale * logits.cross_entropy()
        total, count = self.total_and_count(outputs, targets)
        return total / count.clamp(min=1)
