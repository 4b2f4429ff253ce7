"""Queries of the environment: NVIDIA driver, PyTorch build, device, memory and supported precisions."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from fastamp.amp.policy import cpu_flags, native_bfloat16
from fastamp.utils.env import available_memory
from fastamp.utils.errors import summarize_error
from fastamp.utils.plugins import distribution_name, installed_plugins
from fastamp.utils.version import __version__

# Linux calls it asimdhp, PyTorch fp16_arith.
_CPU_FP16_FLAGS = ("avx512_fp16", "asimdhp", "fp16_arith")


@dataclass(frozen=True)
class Support:
    """Support of a precision by a device, and its reason.

    Attributes:
        state: ``"native"``, ``"slow"`` (emulated) or ``"no"``.
        reason: why the precision has this state, e.g. ``"MPS has native float16"``.
    """

    state: str
    reason: str


def versions() -> dict[str, str]:
    """Return the versions of fastamp, Python, PyTorch, torchvision, NumPy and the installed plugins."""
    packages = {"fastamp": __version__, "Python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("torchvision", "numpy"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "unknown"
    return packages | {f"plugin {entry.name}": distribution_name(entry) for entry in installed_plugins()}


def system() -> str:
    """Return the operating system and the architecture, e.g. ``"Debian GNU/Linux 12 (bookworm) (x86_64)"``."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = f"{platform.system()} {platform.release()}"
    return f"{name} ({platform.machine()})"


def build() -> str:
    """Return the platform of the PyTorch build: ``"CUDA 13.2"``, ``"ROCm 6.3"``, or ``""`` for CPU only."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else ""


def cuda_error() -> str:
    """Return PyTorch's error message if PyTorch cannot use a GPU, else an empty string."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except Exception as error:
        return summarize_error(error)
    return "torch.cuda.is_available() is False"


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports, even if no GPU is usable; None without a driver.

    Raises:
        RuntimeError: if the driver library returns an error, e.g. the stub library of the CUDA toolkit.
    """
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(number))
    if status != 0:
        raise RuntimeError(f"cuDriverGetVersion returned error {status}")
    return (number.value // 1000, number.value % 1000 // 10) if number.value else None


def driver_version() -> str | None:
    """Return the driver version according to nvidia-smi; None if nvidia-smi is not installed.

    Raises:
        RuntimeError: if nvidia-smi fails or finds no GPU; the message contains its output.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    output, *_ = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
    if done.returncode != 0 or not done.stdout.strip():
        raise RuntimeError(f"nvidia-smi failed: {output}")
    return output


def loaded_driver_version() -> str | None:
    """Return the version of the loaded driver, from /proc on Linux without starting a process, else from nvidia-smi.

    Raises:
        RuntimeError: see ``driver_version``.
    """
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read())
    except OSError:
        match = None
    return match[1] if match else driver_version()


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for ROCm."""
    return torch.cuda.get_device_capability(device) if torch.version.cuda else None


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Return True if code built for ``arch`` runs on a device.

    Machine code (``sm_86``) runs on GPUs with the same major and the same or a higher minor version. PTX
    (``compute_80``) runs on GPUs with the same or any later version. With suffix f, both kinds of code run only on the
    same major version; with suffix a, only on exactly the named version.

    Args:
        arch: an entry of ``torch.cuda.get_arch_list()``.
        capability: compute capability of the device.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if not parts:
        return False
    kind, suffix, built = parts[1], parts[4], (int(parts[2]), int(parts[3]))
    if suffix == "a":
        return built == capability
    if kind == "compute" and not suffix:
        return built <= capability
    return built[0] == capability[0] and built <= capability


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU; empty if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def memory(device: torch.device) -> tuple[int | None, int | None]:
    """Return ``(free, total)`` memory of a CUDA device, else of the system, in bytes; None for unknown values."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    return available_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def supported(device: torch.device) -> dict[str, Support]:
    """Return the support of ``device`` for each precision: float32, bfloat16, float16 and, only on CUDA, tf32."""
    supports = {"float32": Support("native", "all devices support float32")}
    if device.type == "cuda" and torch.version.cuda:
        supports["tf32"] = _tf32(device)
    native, reason = native_bfloat16(device)
    supports["bfloat16"] = Support("native" if native else _without_native_bfloat16(device), reason)
    supports["float16"] = _float16(device)
    return supports


def _tf32(device: torch.device) -> Support:
    name = torch.cuda.get_device_name(device)
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return Support("native", f"{name} has TF32; SOLVER.TF32 enables it")
    return Support("no", f"{name} has no TF32; SOLVER.TF32 has no effect")


def _without_native_bfloat16(device: torch.device) -> str:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return "slow" if torch.cuda.is_bf16_supported() else "no"
    return "no" if device.type == "mps" else "slow"


def _float16(device: torch.device) -> Support:
    if device.type == "mps":
        return Support("native", "MPS has native float16")
    if device.type == "cuda":
        name, version = torch.cuda.get_device_name(device), capability(device)
        # 5.3, 6.0 and 6.2 compute float16 at twice the speed of float32, 6.1 at 1/64; 7.0 introduced tensor cores.
        if version is None or version >= (7, 0) or version in ((5, 3), (6, 0), (6, 2)):
            return Support("native", f"{name} has native float16")
        return Support("slow", f"{name} has no native float16, or only at low speed")
    flags = cpu_flags()
    present = [flag for flag in _CPU_FP16_FLAGS if flag in flags]
    if present:
        return Support("native", f"this CPU has native float16 ({', '.join(present)})")
    return Support("slow", "this CPU has no native float16 instructions (avx512_fp16 or Arm fp16)")
