"""One object that decides in which precision a model computes, and the only place that turns autocast on."""

import dataclasses
import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastamp.utils.errors import ConfigError, TrainingError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CPU_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``, and so on."""
    return str(dtype).removeprefix("torch.")


def resolve_device(name: str) -> torch.device:
    """Return the device that ``MODEL.DEVICE`` names; ``"auto"`` is CUDA, else MPS, else the CPU.

    Raises:
        ConfigError: the name is no device, or the device is not on this machine.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"MODEL.DEVICE: {name!r} is no device; use auto, cpu, cuda, cuda:N or mps") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"MODEL.DEVICE: {name!r} is not supported; use auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            build = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
            raise ConfigError(
                f"MODEL.DEVICE is {name!r}, but PyTorch finds no CUDA device (PyTorch {torch.__version__} {build}).\n"
                "  fix: MODEL.DEVICE auto (or cpu), or install a driver and a PyTorch that fit each other"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ConfigError(f"MODEL.DEVICE is {name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("MODEL.DEVICE is 'mps', but PyTorch finds no MPS device here; use auto or cpu")
    return device


def native_bfloat16(device: torch.device) -> tuple[bool, str]:
    """Return whether the device computes bfloat16 natively, and the reason in words."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(device)
        return native, f"{name} has {'native' if native else 'no native'} bfloat16"
    if device.type == "mps":
        try:
            native = torch.backends.mps.is_macos_or_newer(14, 0)
        except (AttributeError, RuntimeError):
            native = False
        return native, f"MPS on this macOS has {'native' if native else 'no'} bfloat16"
    flags = cpu_flags()
    found = [flag for flag in _CPU_BF16_FLAGS if flag in flags]
    if found:
        return True, f"this CPU has native bfloat16 ({', '.join(found)})"
    return False, "this CPU has no native bfloat16 instructions (avx512_bf16, amx_bf16 or Arm bf16)"


def cpu_flags() -> set[str]:
    """Return the CPU's feature flags as Linux names them; on other systems what PyTorch knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.lower().startswith(("flags", "features")):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return {name for name, there in capabilities().items() if there is True} if capabilities else set()


def auto_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype that ``SOLVER.AMP.DTYPE auto`` stands for on this device, and why."""
    native, reason = native_bfloat16(device)
    if native:
        return torch.bfloat16, reason
    if device.type == "cuda":
        return torch.float16, f"{reason}; float16 with loss scaling instead"
    return torch.float32, f"{reason}; float32 instead"


@dataclass(frozen=True)
class PrecisionPolicy:
    """In which precision a model computes, shared by everything that runs its forward pass.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"`` or ``"mps"``: that of the model's parameters. A wrong one turns
            autocast off without a word, so it is never left to a default.
        dtype: the dtype of matrix products and convolutions: float32 (no autocast), bfloat16 or float16.
        reason: why this dtype was chosen, for the log.
        tf32: whether float32 products may be computed in TensorFloat-32 (CUDA).
    """

    device_type: str
    dtype: torch.dtype
    reason: str = "asked for"
    tf32: bool = False

    @classmethod
    def from_config(cls, cfg: Any, device: torch.device) -> "PrecisionPolicy":
        """Return the policy that ``SOLVER.AMP`` and ``SOLVER.TF32`` ask for on ``device``, and apply its TF32 rule.

        Raises:
            ConfigError: a DTYPE asked for by name that the device cannot run.
        """
        amp, device_type = cfg.SOLVER.AMP, device.type
        if not amp.ENABLED:
            dtype, reason = torch.float32, "SOLVER.AMP is off"
        elif amp.DTYPE == "auto":
            dtype, reason = auto_dtype(device)
            if dtype == torch.float32:
                _warn_once(f"SOLVER.AMP is on, but {reason}")
        else:
            dtype, reason = DTYPES[amp.DTYPE], "asked for by SOLVER.AMP.DTYPE"
            _check_runs(device, dtype)
            if dtype == torch.bfloat16:
                native, detail = native_bfloat16(device)
                reason += f"; {detail}" if native else f"; slow: {detail}"
            elif device_type == "cpu":
                reason += "; slow: a CPU emulates float16"
        policy = cls(device_type, dtype, reason, tf32=cfg.SOLVER.TF32)
        policy.apply_tf32()
        return policy

    @classmethod
    def float32(cls, cfg: Any, device: torch.device) -> "PrecisionPolicy":
        """Return the policy of a trainer that computes in float32 whatever ``SOLVER.AMP`` says."""
        policy = cls(device.type, torch.float32, "this trainer computes in float32", tf32=cfg.SOLVER.TF32)
        policy.apply_tf32()
        return policy

    @property
    def enabled(self) -> bool:
        """Whether a low-precision dtype is used."""
        return self.dtype != torch.float32

    @property
    def needs_loss_scaling(self) -> bool:
        """float16 gradients underflow without a loss scale; bfloat16 has float32's range and needs none."""
        return self.dtype == torch.float16

    def autocast(self) -> AbstractContextManager[None]:
        """Return a fresh context for one forward pass; never around an optimizer step or a change of weights."""
        if not self.enabled:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @contextmanager
    def checked_autocast(self) -> Iterator[None]:
        """Like ``autocast``, and fail when nothing inside ran in low precision; for the first forward of a run.

        Raises:
            TrainingError: AMP is on, but no operation produced a tensor of the policy's dtype.
        """
        if not self.enabled:
            yield
            return
        witness = _DtypeRecorder(self.dtype)
        with witness, self.autocast():
            yield
        if not witness.seen:
            raise TrainingError(
                f"SOLVER.AMP is on ({self.describe()}), but the first forward pass ran no operation in "
                f"{dtype_name(self.dtype)}: mixed precision has no effect on this model.\n"
                f"  the policy's device type: {self.device_type}\n"
                "  cause: the model's parameters are on another device type, every module is forced to float32 "
                "(SOLVER.AMP.FORCE_FP32), or the model turns autocast off itself.\n"
                "  fix: remove what disables it, or turn SOLVER.AMP off"
            )

    def in_float32(self) -> "PrecisionPolicy":
        """Return the same policy computing in float32, to compare with."""
        return dataclasses.replace(self, dtype=torch.float32, reason="for comparison")

    def for_evaluation(self, eval_dtype: str) -> "PrecisionPolicy":
        """Return the policy of evaluation under ``SOLVER.AMP.EVAL_DTYPE`` ("same" or "float32")."""
        if eval_dtype == "same" or not self.enabled:
            return self
        return PrecisionPolicy(self.device_type, torch.float32, "SOLVER.AMP.EVAL_DTYPE is float32", self.tf32)

    def fall_back(self, dtype: str, reason: str) -> "PrecisionPolicy | None":
        """Return this policy with another dtype, for a run that cannot go on in its own; None when it is of no use.

        Args:
            dtype: ``SOLVER.AMP.ON_FAILURE``: ``"error"``, which is never of use, ``"bfloat16"`` or ``"float32"``.
            reason: why, for the log.
        """
        if dtype == "error" or not self.enabled or DTYPES[dtype] == self.dtype:
            return None
        return dataclasses.replace(self, dtype=DTYPES[dtype], reason=reason)

    def check_model(self, model: nn.Module) -> None:
        """Check that the model's parameters are float32 and on the policy's device type.

        Raises:
            TrainingError: parameters in low precision (``model.half()``), or on another device type.
        """
        low = [name for name, p in model.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)]
        if low:
            raise TrainingError(
                f"{len(low)} parameters are in low precision, e.g. {', '.join(low[:3])}: mixed precision keeps "
                "parameters in float32.\n  fix: remove model.half() or .to(dtype); SOLVER.AMP casts per operation"
            )
        elsewhere = {p.device.type for p in model.parameters()} - {self.device_type}
        if elsewhere:
            raise TrainingError(
                f"the precision policy is for {self.device_type}, but parameters are on "
                f"{', '.join(sorted(elsewhere))}: autocast would be off without a word.\n"
                "  fix: build the policy for the model's device, or move the model to MODEL.DEVICE before training"
            )

    def compare(self, trained: dict[str, Any] | None, what: str) -> None:
        """Log a warning when ``trained``, another policy's ``state_dict``, computes in another dtype than this one.

        Args:
            trained: from a checkpoint; None when it has none, which is no warning.
            what: the sentence's beginning, e.g. ``"these weights were trained"``.
        """
        if isinstance(trained, dict) and trained.get("dtype") not in (None, dtype_name(self.dtype)):
            logger.warning(
                "%s in %s; the precision now is %s: results may differ", what, trained["dtype"], dtype_name(self.dtype)
            )

    def apply_tf32(self) -> None:
        """Allow or forbid TF32 in float32 products and convolutions, so that "float32" means what it says."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Say so when a run that is resumed was trained under another policy; the policy itself stays."""
        self.compare(state, "this run was trained so far")

    def describe(self) -> str:
        """Return one line for the log, e.g. ``"bf16 on cpu: this CPU has native bfloat16 (avx512_bf16)"``."""
        return f"{_SHORT[self.dtype]} on {self.device_type}: {self.reason}" + ("; TF32 allowed" if self.tf32 else "")

    def state_dict(self) -> dict[str, Any]:
        """Return the policy as plain values, for a checkpoint."""
        return {
            "device_type": self.device_type,
            "dtype": dtype_name(self.dtype),
            "reason": self.reason,
            "tf32": self.tf32,
        }


class _DtypeRecorder(TorchDispatchMode):
    """Notes whether any operation inside returned a tensor of the given dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A cast alone proves nothing: autocast would still have to compute something with it.
        if not self.seen and func is not torch.ops.aten._to_copy.default:
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            self.seen = any(isinstance(item, torch.Tensor) and item.dtype == self.dtype for item in outputs)
        return out


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _check_runs(device: torch.device, dtype: torch.dtype) -> None:
    """Run one tiny matrix product in ``dtype``.

    Raises:
        ConfigError: the device refuses it.
    """
    try:
        a = torch.ones(8, 8, device=device, dtype=dtype)
        finite = bool(torch.isfinite(a @ a).all())
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"SOLVER.AMP.DTYPE is {dtype_name(dtype)}, which this {device.type} device cannot compute "
            f"({str(error).splitlines()[0]}).\n  fix: SOLVER.AMP.DTYPE auto"
        ) from error
    if not finite:
        raise ConfigError(f"SOLVER.AMP.DTYPE {dtype_name(dtype)}: a product of ones is not finite on this device")
