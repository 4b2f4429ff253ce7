"""Seeds of random numbers."""

import torch

from fastamp.utils.env import seed_all

__all__ = ["seed_all_rng"]


def seed_all_rng(seed: int | None = None) -> None:
    """Seed the global generators of Python, NumPy and PyTorch.

    Args:
        seed: the seed. Default None: a random seed.
    """
    seed_all(torch.seed() % 2**31 if seed is None else seed)
