"""What a machine can do for a training, as the table that heads its log, and what is wrong with it."""

import os
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from tabulate import tabulate

from fastamp.amp.policy import DTYPES, PrecisionPolicy, auto_dtype, dtype_name
from fastamp.diagnostics import environment_queries as queries
from fastamp.diagnostics.environment_queries import Support
from fastamp.diagnostics.smoke_train import SmokeTrainResult, smoke_train
from fastamp.utils.env import available_cores
from fastamp.utils.errors import summarize_error
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "MachineReport": "fastamp.diagnostics.environment.EnvironmentReport",
        "inspect_machine": "fastamp.diagnostics.environment.inspect_environment",
    },
)

T = TypeVar("T")

_INSTALL = "https://pytorch.org/get-started/locally"
_VERDICTS = {True: "ok", False: "problem", None: ""}


@dataclass(frozen=True)
class EnvironmentReport:
    """The machine as a training on ``device`` finds it; None and empty are what does not apply or is not known.

    Attributes:
        versions: package -> version.
        platform: operating system and architecture.
        cores: CPU cores that this process may use.
        device, device_name: e.g. ``"cuda:0"``, ``"NVIDIA H200"``.
        asked: ``MODEL.DEVICE`` as the user wrote it.
        build: what PyTorch was built for, ``"CUDA 13.2"`` or ``"ROCm 6.3"``.
        arch_list: the compute capabilities that it was built for, e.g. ``"sm_90"``.
        capability: the device's compute capability, e.g. ``(9, 0)``.
        driver: version of the NVIDIA driver.
        driver_cuda: the newest CUDA that the driver supports, e.g. ``(12, 8)``; None without a driver.
        cuda_error: why PyTorch cannot use a GPU; empty when it can.
        cuda_visible_devices: that environment variable; None when it is not set.
        free_memory, total_memory: bytes, of the CUDA device, else of the system.
        support: precision -> how the device computes in it; ``"tf32"`` is CUDA's alone.
        auto: the dtype that ``SOLVER.AMP.DTYPE auto`` stands for here, and why.
        loops: dtype -> what ten training steps in it have shown, for those that the device runs; empty where none were
            asked for.
        unknown: question -> why it has no answer.
    """

    versions: dict[str, str]
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
        """Whether the driver can run PyTorch's build; it can all of its own major version of CUDA, and older ones."""
        if self.driver_cuda is None or not self.build.startswith("CUDA "):
            return None
        return self.driver_cuda[0] >= int(self._build_major)

    @property
    def capability_fits(self) -> bool | None:
        """Whether PyTorch's build has code for the device."""
        if self.capability is None or not self.arch_list:
            return None
        return any(queries.runs_on(arch, self.capability) for arch in self.arch_list)

    @property
    def problems(self) -> list[str]:
        """What is wrong, each with its cause and what to do; a machine without a GPU is all right."""
        found = self._gpu_problem() or self._capability_problem()
        # Without code for the device every loop fails, for that reason.
        return ([found] if found else []) + (self._loop_problems() if self.capability_fits is not False else [])

    def table(self) -> str:
        """Return what was looked at, what was found, and what that means."""
        rows = [
            ["versions", self._versions_text(), ""],
            ["platform", f"{self.platform}, {self.cores} cores", ""],
            ["device", self._device_text(), ""],
            ["memory", self._memory_text(), ""],
            ["PyTorch built for", self.build or "the CPU alone", ""],
            ["driver", self._driver_text(), _VERDICTS[self.driver_fits]],
        ]
        if self._gpu_problem():
            rows.append(["GPU", self.cuda_error, "problem"])
        if self.capability:
            found = f"{_dotted(self.capability)}; the build has {' '.join(self.arch_list) or 'none that is known'}"
            rows.append(["compute capability", found, _VERDICTS[self.capability_fits]])
        rows += [[name, support.reason, support.state] for name, support in self.support.items()]
        if self.auto:
            rows.append(["SOLVER.AMP.DTYPE auto", self.auto[1], self.auto[0]])
        for name, loop in self.loops.items():
            rows.append([f"ten steps in {name}", loop.describe(), "problem" if loop.error else "ok"])
        rows += [[question, error, "unknown"] for question, error in self.unknown.items()]
        lines = [line for row in rows for line in _wrapped(*row)]
        return tabulate(lines, headers=["check", "found", "verdict"], tablefmt="github", disable_numparse=True)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        verdicts = {"driver_fits": self.driver_fits, "capability_fits": self.capability_fits}
        return asdict(self) | verdicts | {"problems": self.problems}

    @property
    def _build_major(self) -> str:
        return self.build.partition(" ")[2].partition(".")[0]

    def _versions_text(self) -> str:
        return ", ".join(f"{name} {number}" for name, number in self.versions.items())

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
            return f"{total}, unknown how much is free"
        return f"{self.free_memory / 2**30:.1f} of {total} free"

    def _driver_text(self) -> str:
        if self.driver_cuda is None:
            return "no NVIDIA driver"
        return f"NVIDIA driver {self.driver + ' ' if self.driver else ''}for CUDA {_dotted(self.driver_cuda)}"

    def _gpu_problem(self) -> str:
        """Return why a GPU that is there, or was asked for, cannot be used; empty when nobody misses it."""
        named = next((name for name in (self.asked, self.device) if name.startswith("cuda")), "")
        if not self.cuda_error or not (named or (self.asked == "auto" and self.driver_cuda)):
            return ""
        visible = self.cuda_visible_devices
        torch_version = f"PyTorch {self.versions['torch']}"
        if self.driver_cuda is None:
            cause = "no NVIDIA driver is installed, or it cannot be loaded here"
            fix = "MODEL.DEVICE auto (or cpu), install a driver, or give the container its GPUs (--gpus all)"
        elif not self.build:
            cause = f"{torch_version} was built without CUDA, and there is an {self._driver_text()}"
            fix = f"a PyTorch built for CUDA {self.driver_cuda[0]} ({_INSTALL}), or MODEL.DEVICE cpu"
        elif self.driver_fits is False:
            cause = f"the {self._driver_text()} is too old for {torch_version}, which was built for {self.build}"
            fix = (
                f"a driver for CUDA {self._build_major}, a PyTorch built for CUDA {self.driver_cuda[0]} ({_INSTALL}), "
                "or MODEL.DEVICE cpu"
            )
        elif named or (self.driver and (visible is None or visible.strip() not in ("", "-1"))):
            # nvidia-smi lists a GPU (else there is no self.driver), and nobody hides it on purpose.
            cause = f"driver and build fit each other ({self._driver_text()}, {self.build}), but no GPU answers"
            if visible is not None:
                cause += f"; CUDA_VISIBLE_DEVICES is {visible!r}"
            fix = (
                "see that nvidia-smi and CUDA_VISIBLE_DEVICES name the GPU and that this process may open it (a "
                "container: --gpus all), restart the machine after a change of its driver, or MODEL.DEVICE cpu"
            )
        else:
            return ""
        device = f"MODEL.DEVICE is {named}" if named else "MODEL.DEVICE auto stands for the CPU"
        return f"PyTorch cannot use a GPU, and {device}.\n  found: {self.cuda_error}\n  cause: {cause}.\n  fix: {fix}"

    def _capability_problem(self) -> str:
        if self.capability is None or self.capability_fits is not False:
            return ""
        return (
            f"PyTorch {self.versions['torch']} has no code for {self.device_name or self.device}.\n"
            f"  found: compute capability {_dotted(self.capability)}; the build has {' '.join(self.arch_list)}\n"
            f"  cause: the GPU is newer or older than those that this build ({self.build}) is for.\n"
            f"  fix: a PyTorch built for sm_{self.capability[0]}{self.capability[1]} ({_INSTALL}), or MODEL.DEVICE cpu"
        )

    def _loop_problems(self) -> list[str]:
        failed = {name: loop.error for name, loop in self.loops.items() if loop.error}
        if "float32" in failed:
            elsewhere = "" if self.device == "cpu" else ", free the device's memory, or MODEL.DEVICE cpu"
            return [
                f"ten training steps of a tiny model do not work on {self.device}, not even in float32.\n"
                f"  found: {failed['float32']}\n"
                "  cause: PyTorch does not work on this device; the precision is not to blame.\n"
                f"  fix: install PyTorch anew ({_INSTALL}){elsewhere}"
            ]
        works = [f"SOLVER.AMP.DTYPE {name}" for name in self.loops if name not in ("float32", *failed)]
        return [
            f"ten training steps of a tiny model do not work in {name} on {self.device}.\n"
            f"  found: {error}\n"
            f"  cause: float32 works, and PyTorch {self.versions['torch']} fails in {name} on this device.\n"
            f"  fix: {' or '.join([*works, 'SOLVER.AMP off'])}"
            for name, error in failed.items()
        ]


def inspect_environment(device: torch.device, *, asked: str = "auto", train: bool = False) -> EnvironmentReport:
    """Return what a training on ``device`` finds here, in some hundredths of a second without ``train``.

    ``torch.utils.collect_env`` is not used: ``get_env_info`` lists all packages, which takes a second, and runs a
    shell, and nvidia-smi several times. Random states, TF32 flags and the log stay as they are. What a question fails
    with is noted, and never raised.

    Args:
        device: that of the training, also one that is not there.
        train: also train a tiny model for ten steps in each precision that ``device`` runs, which takes seconds.
        asked: ``MODEL.DEVICE``; a GPU that cannot be used is a problem where that is ``"auto"``, and none where it is
            ``"cpu"``.
    """
    unknown: dict[str, str] = {}

    def ask(what: str, question: Callable[[], T], default: T) -> T:
        try:
            return question()
        except Exception as error:
            unknown[what] = summarize_error(error)
            return default

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's on an old driver, e.g., is a problem of the report
        cuda_error = ask("whether PyTorch can use a GPU", queries.cuda_error, "unknown")
        # A kernel module that is loaded tells no more than its version; nvidia-smi, which is slow, also finds the GPU.
        driver_version = queries.driver_version if cuda_error else queries.loaded_driver_version
        there = device.type != "cuda" or not cuda_error
        on_cuda = device.type == "cuda" and there
        capability = ask("compute capability", lambda: queries.capability(device), None) if on_cuda else None
        driver_cuda = ask("the driver's CUDA version", queries.driver_cuda, None)
        free, total = ask("memory", lambda: queries.memory(device if there else torch.device("cpu")), (None, None))
        support = ask("precisions", lambda: queries.supported(device), {}) if there else {}
        auto = ask("SOLVER.AMP.DTYPE auto", lambda: auto_dtype(device), None) if there else None
        tried = [name for name in DTYPES if train and there and (name not in support or support[name].state != "no")]
        return EnvironmentReport(
            versions=ask("versions", queries.versions, {"torch": torch.__version__}),
            platform=ask("system", queries.system, ""),
            cores=available_cores(),
            device=str(device),
            device_name=ask("the device's name", lambda: queries.device_name(device), "") if there else "",
            asked=asked,
            build=queries.build(),
            arch_list=ask("the build's compute capabilities", torch.cuda.get_arch_list, []),
            capability=capability,
            driver=ask("the driver's version", driver_version, None) if driver_cuda else None,
            driver_cuda=driver_cuda,
            cuda_error=cuda_error,
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            free_memory=free,
            total_memory=total,
            support=support,
            auto=(dtype_name(auto[0]), auto[1]) if auto else None,
            loops={n: smoke_train(PrecisionPolicy(device.type, DTYPES[n], "ten steps"), device) for n in tried},
            unknown=unknown,
        )


def _wrapped(check: str, found: str, verdict: str) -> list[list[str]]:
    """Return a row of the table as one or several, so that it stays narrow."""
    first, *more = textwrap.wrap(found, 90)
    return [[check, first, verdict], *(["", line, ""] for line in more)]


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
