"""FastFace: face recognition with IResNet, margin heads and Partial FC."""

from fastface import datasets, face_baseline, face_evaluator, iresnet  # noqa: F401  register their components

KEYS = (*datasets.KEYS, *iresnet.KEYS)
