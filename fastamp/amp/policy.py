"""Precision policy: the dtype that a model computes in. No other module enables autocast."""

import dataclasses
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastamp.amp.fp32 import force_fp32
from fastamp.amp.tf32 import set_tf32
from fastamp.config import CfgNode
from fastamp.utils.compiled import uncompiled
from fastamp.utils.errors import ConfigError, TrainingError
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CPU_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
_DEVICES = "auto, cpu, cuda, cuda:N or mps"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def requested_device(cfg: CfgNode) -> str:
    """Return ``MODEL.DEVICE``, or ``"auto"`` if the key was not set and its default, CUDA, is not available."""
    name = cfg.MODEL.DEVICE
    is_missing = name == "cuda" and not cfg.is_set("MODEL.DEVICE") and not torch.cuda.is_available()
    return "auto" if is_missing else name


def resolve_device(name: str, key: str = "MODEL.DEVICE") -> torch.device:
    """Convert ``MODEL.DEVICE`` to a device. ``"auto"`` selects CUDA, else MPS, else the CPU.

    Args:
        name: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        key: config key or flag that was set to this name, for messages. Default ``MODEL.DEVICE``.

    Raises:
        ConfigError: if the name is not a device, or the device is not available.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{key}: unknown device {name!r}.\n  fix: set {key} to {_DEVICES}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"{key}: unsupported device {name!r}.\n  fix: set {key} to {_DEVICES}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            build = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
            raise ConfigError(
                f"{key} is {name!r}, but PyTorch finds no CUDA device (PyTorch {torch.__version__} {build}).\n"
                f"  fix: set {key} to auto (or cpu), or install a matching driver and PyTorch build"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"{key} is {name!r}, but PyTorch finds {torch.cuda.device_count()} CUDA devices.\n"
                f"  fix: set {key} to cuda, or to cuda:N with a smaller N"
            )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"{key} is 'mps', but PyTorch finds no MPS device.\n  fix: set {key} to auto or cpu")
    return device


def native_bfloat16(device: torch.device) -> tuple[bool, str]:
    """Check for native bfloat16 support.

    Returns:
        ``(native, reason)``: whether ``device`` computes in bfloat16 natively, and an explanation for the log.
    """
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
    present = [flag for flag in _CPU_BF16_FLAGS if flag in flags]
    if present:
        return True, f"this CPU has native bfloat16 ({', '.join(present)})"
    return False, "this CPU has no native bfloat16 instructions (avx512_bf16, amx_bf16 or Arm bf16)"


def cpu_flags() -> set[str]:
    """Read the CPU feature flags from /proc/cpuinfo, or from PyTorch if that file does not exist."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.lower().startswith(("flags", "features")):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return {name for name, present in capabilities().items() if present is True} if capabilities else set()


def auto_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """Return ``(dtype, reason)`` for ``SOLVER.AMP.DTYPE auto`` on ``device``. The reason is text for the log."""
    native, reason = native_bfloat16(device)
    if native:
        return torch.bfloat16, reason
    if device.type == "cuda":
        return torch.float16, f"{reason}; float16 with loss scaling instead"
    return torch.float32, f"{reason}; float32 instead"


@dataclass(frozen=True)
class PrecisionPolicy:
    """Precision of a model. All code that runs the forward pass of the model uses the same policy.

    Attributes:
        device_type: device type of the parameters: ``"cpu"``, ``"cuda"`` or ``"mps"``. It has no default because
            autocast for another device type silently has no effect.
        dtype: dtype of matrix products and convolutions: float32 (no autocast), bfloat16 or float16.
        reason: reason for this dtype, for the log.
        tf32: whether float32 matrix products and convolutions may use TensorFloat-32 on CUDA. Default False.
    """

    device_type: str
    dtype: torch.dtype
    reason: str = "requested"
    tf32: bool = False

    @classmethod
    def from_config(cls, cfg: CfgNode, device: torch.device) -> "PrecisionPolicy":
        """Build the policy from ``SOLVER.AMP`` and ``SOLVER.TF32`` for ``device``, and set PyTorch's TF32 flags.

        Raises:
            ConfigError: if ``SOLVER.AMP.DTYPE`` names a dtype that the device does not support.
        """
        amp, device_type = cfg.SOLVER.AMP, device.type
        if not amp.ENABLED:
            dtype, reason = torch.float32, "SOLVER.AMP is off"
        elif amp.DTYPE == "auto":
            dtype, reason = auto_dtype(device)
            if dtype == torch.float32:
                _warn_once(f"SOLVER.AMP is on, but {reason}")
        else:
            dtype, reason = DTYPES[amp.DTYPE], "set by SOLVER.AMP.DTYPE"
            _check_runs(device, dtype)
            if dtype == torch.bfloat16:
                native, detail = native_bfloat16(device)
                reason += f"; {detail}" if native else f"; slow: {detail}"
            elif device_type == "cpu":
                reason += "; slow: float16 is emulated on CPU"
        policy = cls(device_type, dtype, reason, tf32=cfg.SOLVER.TF32)
        policy.apply_tf32()
        return policy

    @classmethod
    def float32(cls, cfg: CfgNode, device: torch.device) -> "PrecisionPolicy":
        """Build a float32 policy, for a trainer that ignores ``SOLVER.AMP``."""
        policy = cls(device.type, torch.float32, "this trainer computes in float32", tf32=cfg.SOLVER.TF32)
        policy.apply_tf32()
        return policy

    @property
    def enabled(self) -> bool:
        """True if the dtype is bfloat16 or float16."""
        return self.dtype != torch.float32

    @property
    def needs_loss_scaling(self) -> bool:
        """True if the dtype is float16, because float16 gradients underflow without a loss scale.

        bfloat16 does not need loss scaling: it has the exponent range of float32.
        """
        return self.dtype == torch.float16

    def autocast(self) -> AbstractContextManager[None]:
        """Create an autocast context for one forward pass. Optimizer steps must run outside of this context."""
        if not self.enabled:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @contextmanager
    def checked_autocast(self, model: nn.Module | None = None) -> Iterator[None]:
        """Create an autocast context for the first forward pass, and check that it computes in low precision.

        Compiled submodules run eagerly in it, in every precision: PyTorch 2.11 never compiles a module whose first pass
        was recorded, and all losses of a compiled pass seem to depend on all its parameters (``check_losses``).

        Args:
            model: model whose child modules are examined: the dtypes in which each child computes matrix products and
                convolutions are logged, and a large child that computes all of them in float32 causes a warning.
                None (default) disables both.

        Raises:
            TrainingError: if AMP is on, but no operation (other than a cast) returned a tensor of the policy's dtype.
        """
        eager = nullcontext() if model is None else uncompiled(model)
        if not self.enabled:
            with eager:
                yield
            return
        recorder = _DtypeRecorder(self.dtype)
        with eager, recorder, self.autocast(), recorder.follow(model):
            yield
        if not recorder.occurred:
            raise TrainingError(
                f"SOLVER.AMP is on ({self.describe()}), but the first forward pass ran no operation in "
                f"{dtype_name(self.dtype)}: mixed precision has no effect on this model.\n"
                f"  device type of the policy: {self.device_type}\n"
                "  cause: the parameters are on another device type, all modules are forced to float32 "
                "(SOLVER.AMP.FORCE_FP32), or the model disables autocast.\n"
                "  fix: enable autocast in the model, shorten SOLVER.AMP.FORCE_FP32, or set SOLVER.AMP to False"
            )
        if model is not None and recorder.products:
            recorder.report(model)

    def in_float32(self) -> "PrecisionPolicy":
        """Return a float32 copy of this policy, as the reference in comparisons."""
        return dataclasses.replace(self, dtype=torch.float32, reason="for comparison")

    def for_evaluation(self, eval_dtype: str) -> "PrecisionPolicy":
        """Return the policy for evaluation under ``SOLVER.AMP.EVAL_DTYPE`` (``"same"`` or ``"float32"``)."""
        if eval_dtype == "same" or not self.enabled:
            return self
        return PrecisionPolicy(self.device_type, torch.float32, "SOLVER.AMP.EVAL_DTYPE is float32", self.tf32)

    def fall_back(self, dtype: str, reason: str) -> "PrecisionPolicy | None":
        """Return a copy of this policy with the fallback ``dtype``; None without a fallback.

        Args:
            dtype: ``SOLVER.AMP.ON_FAILURE``: ``"error"``, ``"bfloat16"`` or ``"float32"``. ``"error"`` and the current
                dtype mean no fallback.
            reason: reason for the fallback, for the log.
        """
        if dtype == "error" or not self.enabled or DTYPES[dtype] == self.dtype:
            return None
        return dataclasses.replace(self, dtype=DTYPES[dtype], reason=reason)

    def check_model(self, model: nn.Module) -> None:
        """Check that the parameters are float32 and on the device type of the policy.

        Raises:
            TrainingError: if parameters are float16 or bfloat16 (``model.half()``), or on another device type.
        """
        low = [name for name, p in model.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)]
        if low:
            raise TrainingError(
                f"{plural(len(low), 'parameter is', 'parameters are')} in low precision, e.g. {', '.join(low[:3])}: "
                "mixed precision keeps parameters in float32.\n  fix: remove model.half() or .to(dtype); SOLVER.AMP "
                "casts per operation"
            )
        other_types = {p.device.type for p in model.parameters()} - {self.device_type}
        if other_types:
            raise TrainingError(
                f"the precision policy is for {self.device_type}, but parameters are on "
                f"{', '.join(sorted(other_types))}: autocast would have no effect.\n"
                "  fix: build the policy for the device of the model, or move the model to MODEL.DEVICE before training"
            )

    def compare(self, trained: dict[str, Any] | None, what: str) -> None:
        """Log a warning if the policy in a checkpoint has another dtype than this policy.

        Args:
            trained: ``state_dict`` of the policy in the checkpoint, or None if the checkpoint contains no policy;
                then no warning is logged.
            what: beginning of the warning, e.g. ``"these weights were trained"``.
        """
        if isinstance(trained, dict) and trained.get("dtype") not in (None, dtype_name(self.dtype)):
            logger.warning(
                "%s in %s, but this process computes in %s: results may differ.\n"
                "  fix: unless the change is intended, set SOLVER.AMP and SOLVER.AMP.DTYPE as in training",
                what,
                trained["dtype"],
                dtype_name(self.dtype),
            )

    def apply_tf32(self) -> None:
        """Set PyTorch's TF32 flags for float32 matrix products and convolutions."""
        set_tf32(self.tf32)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Log a warning if the checkpoint was saved under another dtype; this policy keeps its own dtype."""
        self.compare(state, "this run was trained")

    def describe(self) -> str:
        """Format the policy for the log, e.g. ``"bf16 on cpu: this CPU has native bfloat16 (avx512_bf16)"``."""
        return f"{_SHORT[self.dtype]} on {self.device_type}: {self.reason}" + ("; TF32 allowed" if self.tf32 else "")

    def state_dict(self) -> dict[str, Any]:
        """Return the policy as plain values, for a checkpoint."""
        return {
            "device_type": self.device_type,
            "dtype": dtype_name(self.dtype),
            "reason": self.reason,
            "tf32": self.tf32,
        }


# All decorated functions share the code of the wrapper.
_REGION = force_fp32(lambda: None).__code__
# Operations that autocast runs in low precision and that dominate the time of a model.
_PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm", "matmul", "linear")


class _DtypeRecorder(TorchDispatchMode):
    """Record the dtypes in which the operations of a forward pass compute.

    Attributes:
        occurred: True if an operation other than a cast returned a tensor of ``dtype``.
        products: name of a child module -> result dtype of its matrix products and convolutions -> number of such
            operations. Operations in ``force_fp32`` regions do not count.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.occurred = False
        self.products: dict[str, Counter[torch.dtype]] = {}
        self._child = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A cast does not count: it shows no computation in low precision.
        if func is not torch.ops.aten._to_copy.default and (self._child or not self.occurred):
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            dtypes = [item.dtype for item in outputs if isinstance(item, torch.Tensor)]
            self.occurred |= self.dtype in dtypes
            name = func.overloadpacket.__name__
            is_product = name in _PRODUCTS or name.startswith("_scaled_dot_product")
            if self._child and dtypes and is_product and not _in_fp32_region():
                self.products.setdefault(self._child, Counter())[dtypes[0]] += 1
        return out

    @contextmanager
    def follow(self, model: nn.Module | None) -> Iterator[None]:
        """Record in ``products`` which child module of ``model`` runs each operation."""
        with ExitStack() as handles:
            for name, child in [] if model is None else model.named_children():
                handles.enter_context(
                    child.register_forward_pre_hook(lambda *_, name=name: setattr(self, "_child", name))
                )
                handles.enter_context(child.register_forward_hook(lambda *_: setattr(self, "_child", "")))
            yield

    def report(self, model: nn.Module) -> None:
        """Log the recorded dtypes of each child module, and warn about large ones that computed only in float32."""
        described = (
            f"{name}: {' and '.join(dtype_name(dtype) for dtype in sorted(dtypes, key=str))}"
            for name, dtypes in self.products.items()
        )
        logger.info("precision of matrix products and convolutions: %s", "; ".join(described))
        total = sum(p.numel() for p in model.parameters())
        for name, dtypes in self.products.items():
            size = sum(p.numel() for p in model.get_submodule(name).parameters())
            if self.dtype not in dtypes and size >= total / 10:
                logger.warning(
                    "SOLVER.AMP is on, but all matrix products and convolutions of %r ran in float32: mixed precision "
                    "has no effect on this part of the model.\n"
                    "  cause: the module disables autocast.\n"
                    "  fix:   enable autocast in the module, or, if float32 is intended, list the module in "
                    "SOLVER.AMP.FORCE_FP32",
                    name,
                )


def _in_fp32_region() -> bool:
    """Return True if the caller runs inside a function decorated with ``force_fp32``."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _REGION:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _check_runs(device: torch.device, dtype: torch.dtype) -> None:
    """Check that the device computes a small matrix product in ``dtype``.

    Raises:
        ConfigError: if the product fails or is not finite.
    """
    try:
        a = torch.ones(8, 8, device=device, dtype=dtype)
        finite = bool(torch.isfinite(a @ a).all())
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"SOLVER.AMP.DTYPE is {dtype_name(dtype)}, which is unsupported on this {device.type} device "
            f"({str(error).splitlines()[0]}).\n  fix: set SOLVER.AMP.DTYPE to auto"
        ) from error
    if not finite:
        raise ConfigError(
            f"SOLVER.AMP.DTYPE is {dtype_name(dtype)}, but a matrix product of ones in this dtype is not finite "
            f"on this {device.type} device.\n  fix: set SOLVER.AMP.DTYPE to auto"
        )
