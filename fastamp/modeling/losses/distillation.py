"""Knowledge distillation: a student's class probabilities are drawn to a teacher's."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32


@force_fp32
def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, *, temperature: float = 16.0) -> torch.Tensor:
    """Return the mean over a batch of T^2 times the symmetric divergence of softened probabilities.

    Hinton et al. 2015, arXiv:1503.02531, section 2; differs, as FastReID: (KL(t || s) + KL(s || t)) / 2 in place of
    KL(t || s), both with a gradient to the student.

    Args:
        student: (B, K) float logits.
        teacher: (B, K) float logits.
        temperature: T, by which both are divided.

    Returns:
        () float32.
    """
    log_s, log_t = (F.log_softmax(logits / temperature, dim=1) for logits in (student, teacher))
    return ((log_t.exp() - log_s.exp()) * (log_t - log_s)).sum(1).mean() * (temperature**2 / 2)
