"""Knowledge distillation loss."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32


@force_fp32
def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, *, temperature: float = 16.0) -> torch.Tensor:
    """Compute T^2 times the symmetric KL divergence of the softened class probabilities, averaged over the batch.

    Hinton et al. 2015, arXiv:1503.02531, section 2. Differs from the paper, as in FastReID: the loss is
    (KL(t || s) + KL(s || t)) / 2 instead of KL(t || s), and both terms have a gradient for the student.

    Args:
        student: (B, K) float, logits of the student.
        teacher: (B, K) float, logits of the teacher.
        temperature: T, divisor of the logits of student and teacher. Default 16.

    Returns:
        Scalar float32.
    """
    log_s, log_t = (F.log_softmax(logits / temperature, dim=1) for logits in (student, teacher))
    return ((log_t.exp() - log_s.exp()) * (log_t - log_s)).sum(1).mean() * (temperature**2 / 2)
