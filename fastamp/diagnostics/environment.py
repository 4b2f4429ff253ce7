"""Environment report: versions, device, driver and supported precisions, and any problems found."""

import os
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from tabulate import tabulate

from fastamp.amp.policy import DTYPES, PrecisionPolicy, auto_dtype, dtype_name
from fastamp.data.image_decoder import image_decoder
from fastamp.diagnostics import environment_queries as queries
from fastamp.diagnostics.environment_queries import Support
from fastamp.diagnostics.smoke_train import SmokeTrainResult, smoke_train
from fastamp.utils.env import available_cores
from fastamp.utils.errors import summarize_error

T = TypeVar("T")

_INSTALL = "https://pytorch.org/get-started/locally"
_VERDICTS = {True: "ok", False: "problem", None: ""}


@dataclass(frozen=True)
class EnvironmentReport:
    """Environment of a training run on ``device``. Values that are unknown or do not apply are None or empty.

    Attributes:
        versions: package -> version.
        image_decoder: decoder of JPEG files and its version.
        platform: operating system and architecture.
        cores: number of CPU cores available to this process.
        device, device_name: e.g. ``"cuda:0"``, ``"NVIDIA H200"``.
        asked: ``MODEL.DEVICE`` as set by the user.
        build: platform of the PyTorch build, e.g. ``"CUDA 13.2"`` or ``"ROCm 6.3"``.
        arch_list: compute capabilities of the build, e.g. ``"sm_90"``.
        capability: compute capability of the device, e.g. ``(9, 0)``.
        driver: version of the NVIDIA driver.
        driver_cuda: newest CUDA version that the driver supports, e.g. ``(12, 8)``; None without a driver.
        cuda_error: reason why PyTorch cannot use a GPU; empty if it can.
        cuda_visible_devices: environment variable CUDA_VISIBLE_DEVICES; None if not set.
        free_memory, total_memory: memory of the CUDA device, else of the system, in bytes.
        support: precision -> support by the device; ``"tf32"`` only for CUDA.
        auto: ``(dtype, reason)``: dtype that ``SOLVER.AMP.DTYPE auto`` selects on this device, and why.
        loops: supported dtype -> result of ``smoke_train``; empty if it was not called.
        unknown: query -> error message, for failed queries.
    """

    versions: dict[str, str]
    image_decoder: str
    platform: str
    cores: int
    device: str
    device_name: str
    asked: str
    build: str
    arch_list: list[str]
    capability: tuple[int, int] | None
    driver: str | None
    driver_cuda: tuple[int, int] | None
    cuda_error: str
    cuda_visible_devices: str | None
    free_memory: int | None
    total_memory: int | None
    support: dict[str, Support]
    auto: tuple[str, str] | None
    loops: dict[str, SmokeTrainResult]
    unknown: dict[str, str]

    @property
    def driver_fits(self) -> bool | None:
        """True if the driver supports the CUDA major version of the PyTorch build; None if unknown or without CUDA."""
        if self.driver_cuda is None or not self.build.startswith("CUDA "):
            return None
        return self.driver_cuda[0] >= int(self._build_major)

    @property
    def capability_fits(self) -> bool | None:
        """True if the PyTorch build contains code for the device; None if unknown."""
        if self.capability is None or not self.arch_list:
            return None
        return any(queries.runs_on(arch, self.capability) for arch in self.arch_list)

    @property
    def problems(self) -> list[str]:
        """Messages about problems, each with its cause and a fix. A missing GPU is reported only if requested."""
        problem = self._gpu_problem() or self._capability_problem()
        # Without code for the device, the smoke test fails for that reason.
        return ([problem] if problem else []) + (self._loop_problems() if self.capability_fits is not False else [])

    def table(self) -> str:
        """Format the report as a table."""
        rows = [
            ["versions", ", ".join(f"{name} {number}" for name, number in self.versions.items()), ""],
            ["image decoder", self.image_decoder, ""],
            ["platform", f"{self.platform}, {self.cores} cores", ""],
            ["device", self._device_text(), ""],
            ["memory", self._memory_text(), ""],
            ["PyTorch built for", self.build or "CPU only", ""],
            ["driver", self._driver_text(), _VERDICTS[self.driver_fits]],
        ]
        if self._gpu_problem():
            rows.append(["GPU", self.cuda_error, "problem"])
        if self.capability:
            compute_capability = (
                f"{_dotted(self.capability)}; the build supports {' '.join(self.arch_list) or 'unknown GPUs'}"
            )
            rows.append(["compute capability", compute_capability, _VERDICTS[self.capability_fits]])
        rows += [[name, support.reason, support.state] for name, support in self.support.items()]
        if self.auto:
            rows.append(["SOLVER.AMP.DTYPE auto", self.auto[1], self.auto[0]])
        for name, loop in self.loops.items():
            rows.append([f"ten steps in {name}", loop.describe(), "problem" if loop.error else "ok"])
        rows += [[query, error, "unknown"] for query, error in self.unknown.items()]
        lines = [line for row in rows for line in _wrapped(*row)]
        return tabulate(lines, headers=["check", "found", "verdict"], tablefmt="github", disable_numparse=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        verdicts = {"driver_fits": self.driver_fits, "capability_fits": self.capability_fits}
        return asdict(self) | verdicts | {"problems": self.problems}

    @property
    def _build_major(self) -> str:
        return self.build.partition(" ")[2].partition(".")[0]

    def _device_text(self) -> str:
        details = [self.device_name] if self.device_name else []
        if self.capability:
            details.append(f"compute capability {_dotted(self.capability)}")
        return self.device + (f" ({', '.join(details)})" if details else "")

    def _memory_text(self) -> str:
        if self.total_memory is None:
            return "memory unknown"
        total = f"{self.total_memory / 2**30:.1f} GiB"
        if self.free_memory is None:
            return f"{total}, free memory unknown"
        return f"{self.free_memory / 2**30:.1f} of {total} free"

    def _driver_text(self) -> str:
        if self.driver_cuda is None:
            return "no NVIDIA driver"
        return f"NVIDIA driver {self.driver + ' ' if self.driver else ''}for CUDA {_dotted(self.driver_cuda)}"

    def _gpu_problem(self) -> str:
        """Explain why PyTorch cannot use a GPU that exists or was requested; empty if there is no such problem."""
        named = next((name for name in (self.asked, self.device) if name.startswith("cuda")), "")
        if not self.cuda_error or not (named or (self.asked == "auto" and self.driver_cuda)):
            return ""
        visible = self.cuda_visible_devices
        torch_version = f"PyTorch {self.versions['torch']}"
        if self.driver_cuda is None:
            cause = "no NVIDIA driver is installed, or it cannot be loaded"
            fix = "set MODEL.DEVICE to auto or cpu, install a driver, or start the container with GPUs (--gpus all)"
        elif not self.build:
            cause = f"{torch_version} was built without CUDA, but there is an {self._driver_text()}"
            fix = f"install a PyTorch built for CUDA {self.driver_cuda[0]} ({_INSTALL}), or set MODEL.DEVICE to cpu"
        elif self.driver_fits is False:
            cause = f"the {self._driver_text()} is too old for {torch_version}, which was built for {self.build}"
            fix = (
                f"install a driver for CUDA {self._build_major} or a PyTorch built for CUDA {self.driver_cuda[0]} "
                f"({_INSTALL}), or set MODEL.DEVICE to cpu"
            )
        elif named or (self.driver and (visible is None or visible.strip() not in ("", "-1"))):
            # nvidia-smi lists a GPU (else self.driver is None), and CUDA_VISIBLE_DEVICES does not hide it.
            cause = f"driver and build match ({self._driver_text()}, {self.build}), but no GPU responds"
            if visible is not None:
                cause += f"; CUDA_VISIBLE_DEVICES is {visible!r}"
            fix = (
                "check that nvidia-smi and CUDA_VISIBLE_DEVICES list the GPU and that this process can access it (in a "
                "container: --gpus all), restart the machine after a driver update, or set MODEL.DEVICE to cpu"
            )
        else:
            return ""
        device = f"MODEL.DEVICE is {named}" if named else "MODEL.DEVICE is auto, which selects the CPU"
        return f"PyTorch cannot use a GPU, and {device}.\n  found: {self.cuda_error}\n  cause: {cause}.\n  fix: {fix}"

    def _capability_problem(self) -> str:
        if self.capability is None or self.capability_fits is not False:
            return ""
        return (
            f"PyTorch {self.versions['torch']} has no code for {self.device_name or self.device}.\n"
            f"  found: compute capability {_dotted(self.capability)}; the build supports {' '.join(self.arch_list)}\n"
            f"  cause: the GPU is newer or older than the GPUs that this build ({self.build}) supports.\n"
            f"  fix: install a PyTorch built for sm_{self.capability[0]}{self.capability[1]} ({_INSTALL}), or set "
            "MODEL.DEVICE to cpu"
        )

    def _loop_problems(self) -> list[str]:
        failed = {name: loop.error for name, loop in self.loops.items() if loop.error}
        if "float32" in failed:
            alternatives = "" if self.device == "cpu" else ", free memory on the device, or set MODEL.DEVICE to cpu"
            return [
                f"ten training steps of a tiny model fail on {self.device} in float32.\n"
                f"  found: {failed['float32']}\n"
                "  cause: PyTorch does not work on this device; the precision is not the cause.\n"
                f"  fix: reinstall PyTorch ({_INSTALL}){alternatives}"
            ]
        works = [f"SOLVER.AMP.DTYPE {name}" for name in self.loops if name not in ("float32", *failed)]
        return [
            f"ten training steps of a tiny model fail in {name} on {self.device}.\n"
            f"  found: {error}\n"
            f"  cause: float32 works, but PyTorch {self.versions['torch']} fails in {name} on this device.\n"
            f"  fix: set {' or '.join([*works, 'SOLVER.AMP False'])}"
            for name, error in failed.items()
        ]


def inspect_environment(
    device: torch.device, *, asked: str = "auto", decoder: str = "auto", train: bool = False
) -> EnvironmentReport:
    """Collect the environment report; without ``train``, this takes about 20 ms.

    ``torch.utils.collect_env.get_env_info`` is not used because it takes about one second: it lists all packages, runs
    a shell, and runs nvidia-smi several times. Random states and TF32 flags are not changed, and nothing is logged. If
    a query fails, its error is listed in the report instead of being raised.

    Args:
        device: training device, which may be unavailable.
        train: also train a tiny model for ten steps in each supported precision, which takes seconds. Default False.
        asked: value of ``MODEL.DEVICE``. An unusable GPU is a problem for ``"auto"`` and ``"cuda"``, but not for
            ``"cpu"``. Default ``"auto"``.
        decoder: ``INPUT.DECODER``. Default ``"auto"``.
    """
    unknown: dict[str, str] = {}

    def ask(name: str, query: Callable[[], T], default: T) -> T:
        try:
            return query()
        except Exception as error:
            unknown[name] = summarize_error(error)
            return default

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # e.g. PyTorch's warning about an old driver, which the report covers
        cuda_error = ask("use of a GPU by PyTorch", queries.cuda_error, "unknown")
        # The loaded kernel module only has a version; nvidia-smi is slow but also lists GPUs, which explains an error.
        driver_version = queries.driver_version if cuda_error else queries.loaded_driver_version
        available = device.type != "cuda" or not cuda_error
        on_cuda = device.type == "cuda" and available
        capability = ask("compute capability", lambda: queries.capability(device), None) if on_cuda else None
        driver_cuda = ask("CUDA version of the driver", queries.driver_cuda, None)
        nothing: tuple[int | None, int | None] = (None, None)
        free, total = ask("memory", lambda: queries.memory(device if available else torch.device("cpu")), nothing)
        support: dict[str, queries.Support] = {}
        if available:
            support = ask("precisions", lambda: queries.supported(device), support)
        auto = ask("SOLVER.AMP.DTYPE auto", lambda: auto_dtype(device), None) if available else None
        supported = [name for name in DTYPES if name not in support or support[name].state != "no"]
        return EnvironmentReport(
            versions=ask("versions", queries.versions, {"torch": torch.__version__}),
            image_decoder=ask("image decoder", lambda: str(image_decoder(decoder)), ""),
            platform=ask("system", queries.system, ""),
            cores=available_cores(),
            device=str(device),
            device_name=ask("device name", lambda: queries.device_name(device), "") if available else "",
            asked=asked,
            build=queries.build(),
            arch_list=ask("compute capabilities of the build", torch.cuda.get_arch_list, []),
            capability=capability,
            driver=ask("driver version", driver_version, None) if driver_cuda else None,
            driver_cuda=driver_cuda,
            cuda_error=cuda_error,
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            free_memory=free,
            total_memory=total,
            support=support,
            auto=(dtype_name(auto[0]), auto[1]) if auto else None,
            loops={
                n: smoke_train(PrecisionPolicy(device.type, DTYPES[n], "ten steps"), device)
                for n in supported
                if train and available
            },
            unknown=unknown,
        )


def _wrapped(check: str, value: str, verdict: str) -> list[list[str]]:
    """Split a row with a long text into several rows, to limit the width of the table."""
    first, *more = textwrap.wrap(value, 90)
    return [[check, first, verdict], *(["", line, ""] for line in more)]


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
