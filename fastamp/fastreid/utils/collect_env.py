"""Description of the environment."""

from torch.utils.collect_env import get_pretty_env_info

__all__ = ["collect_env_info"]


def collect_env_info() -> str:
    """Describe Python, PyTorch, CUDA and the devices; ``fastamp doctor --env`` also checks mixed precision."""
    return get_pretty_env_info()
