"""In-place torch.compile, which keeps the class of a model and the names of its tensors."""

# ruff: noqa: SLF001 PyTorch has no public functions for the state of its compiler

import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fastamp.utils.errors import ConfigError
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)


@dataclass
class Compilation:
    """State of the compiled regions of a model.

    Attributes:
        description: config keys and values, for messages.
        folder: folder of compiled code; "" if the backend keeps none.
        seconds: time of the forward passes that compiled something.
        failed: whether a compilation failed; all regions then run eagerly.
        eager: number of contexts of ``uncompiled`` in which the regions run eagerly.
    """

    description: str
    folder: str = ""
    seconds: float = 0.0
    failed: bool = False
    eager: int = 0


class _Region:
    """Compiled forward pass of a module, called instead of the module.

    A batch smaller than the largest so far runs eagerly, such as the last one of a test set: a compilation of its
    shape would cost more. The module runs eagerly also inside another region, which contains it, and with hooks.

    Args:
        module: the module.
        name: name of the module, for messages.
        state: state shared by all regions of the model.
        prepare: function that converts the first argument before a compiled pass. Default: it is not converted.
        clone: whether results are copied from memory that the next pass overwrites (CUDA graphs). Default False.
        options: arguments of torch.compile.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        state: Compilation,
        *,
        prepare: Callable[[Any], Any] | None = None,
        clone: bool = False,
        **options: Any,
    ) -> None:
        self.module, self.name, self.state, self.prepare, self.clone = module, name, state, prepare, clone
        # Not _call_impl, whose graphs all modules of a process would share: they are limited in number.
        self._compiled = torch.compile(module.forward, dynamic=False, **options)
        self._largest = {True: 0, False: 0}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, state = self.module, self.state
        if torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if state.failed or state.eager or hooks:
            return module._call_impl(*args, **kwargs)
        size = _batch_size(args[0]) if args else 0
        if size < self._largest[module.training]:
            return module._call_impl(*args, **kwargs)
        self._largest[module.training] = size
        if self.prepare:
            args = (self.prepare(args[0]), *args[1:])
        if self.clone:
            torch.compiler.cudagraph_mark_step_begin()
        counted, start = _counts(), time.perf_counter()
        failure = None
        try:
            result = self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = _first_line(getattr(error, "inner_exception", error))
        if failure:
            return self._run_after(failure, *args, **kwargs)
        if _counts() != counted:
            seconds = time.perf_counter() - start
            state.seconds += seconds
            logger.info("%s", _describe(self, counted, seconds))
        return _clone(result) if self.clone else result

    def _run_after(self, failure: str, *args: Any, **kwargs: Any) -> Any:
        """Run the module eagerly after a failed compilation. An error of this pass is the module's, and is raised."""
        state = self.state
        state.failed = True  # regions inside this one do not compile, either
        try:
            result = self.module._call_impl(*args, **kwargs)
        except BaseException:
            state.failed = False
            raise
        logger.warning(
            "%s: the compilation of %s failed, so the model runs eagerly: %s\n  fix: set MODEL.COMPILE to off",
            state.description,
            self.name,
            failure,
        )
        return result


def compile_parts(
    model: nn.Module,
    names: Sequence[str],
    backend: str,
    *,
    mode: str = "default",
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Compile submodules of a model. Compilation runs in their first forward pass.

    If a compilation fails, a warning is logged, and the model runs eagerly.

    Args:
        model: the model; its class and the names of its tensors do not change.
        names: names of the submodules; ``""`` is the model itself.
        backend: backend of torch.compile.
        mode: mode of the backend inductor. Default ``"default"``.
        prepare: see ``_Region``; for the model itself.

    Raises:
        ConfigError: if the backend does not have the mode or the device does not support it, or the backend needs a
            compiler that was not found.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    _check(backend, mode, device)
    description = f"MODEL.COMPILE {backend}" + (f", MODEL.COMPILE_MODE {mode}" if mode != "default" else "")
    state, options = Compilation(description), {"backend": backend}
    if mode != "default":
        options["mode"] = mode
    import torch._functorch.config as functorch

    if backend == "inductor":
        from torch._inductor.runtime.runtime_utils import cache_dir

        state.folder = cache_dir()

    # The backward pass is compiled in the forward pass too, where an error leads to the eager pass.
    option = "force_non_lazy_backward_lowering"
    if hasattr(functorch, option):  # since PyTorch 2.7
        setattr(functorch, option, True)
    for name in names:
        module = model.get_submodule(name)
        graphs = mode != "default" and device == "cuda" and not name
        vars(module)["_compiled_call_impl"] = _Region(
            module, name or "the model", state, prepare=None if name else prepare, clone=graphs, **options
        )


def compilation_of(model: nn.Module) -> Compilation | None:
    """Return the state of the compiled regions of a model; None if it is not compiled or the compilation failed."""
    return next((region.state for region in _regions(model) if not region.state.failed), None)


def repeated_blocks(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of the modules in submodules of a model that are repeated, e.g. the blocks of a transformer.

    These are the items of the outermost lists of at least two modules of one class with submodules, other than lists
    of modules, such as stages: their blocks may be called without them. The compiled code of one is reused for the
    others.
    """
    found: list[str] = []
    for root in names:
        for name, module in model.get_submodule(root).named_modules(prefix=root):
            if any(name.startswith(f"{outer}.") for outer in found):
                continue
            children = dict(module.named_children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else {}
            kinds = {type(child) for child in children.values()}
            if len(children) < 2 or len(kinds) > 1 or kinds <= {nn.ModuleList, nn.Sequential}:
                continue
            if all(any(child.children()) for child in children.values()):
                found += [f"{name}.{child}" for child in children]
    return found


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Create a context that runs compiled submodules eagerly, so that their hooks are called.

    Contexts may overlap: the submodules are compiled again after the last one.
    """
    states = {id(region.state): region.state for region in _regions(model)}
    for state in states.values():
        state.eager += 1
    try:
        yield
    finally:
        for state in states.values():
            state.eager -= 1


def _regions(model: nn.Module) -> Iterator["_Region"]:
    regions = (module._compiled_call_impl for module in model.modules())
    return (region for region in regions if isinstance(region, _Region))


def _check(backend: str, mode: str, device: str) -> None:
    """Raise ConfigError unless ``backend`` supports ``mode`` on a type of device and finds its compiler."""
    if mode != "default" and backend != "inductor":
        raise ConfigError(
            f"MODEL.COMPILE_MODE is {mode}, which only the backend inductor has, but MODEL.COMPILE is {backend}.\n"
            "  fix: set MODEL.COMPILE to inductor, or MODEL.COMPILE_MODE to default"
        )
    for key, value, graphs, other in (
        ("MODEL.COMPILE", backend, "cudagraphs", "inductor"),
        ("MODEL.COMPILE_MODE", mode, "reduce-overhead", "default"),
    ):
        if value == graphs and device != "cuda":
            raise ConfigError(
                f"{key} is {value}, which uses CUDA graphs, but MODEL.DEVICE is {device}.\n  fix: set {key} to {other}"
            )
    if backend == "inductor" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))):
        raise ConfigError(
            "MODEL.COMPILE is inductor, which needs a C++ compiler, but g++, c++ and clang++ were not found.\n"
            "  fix: install a C++ compiler, or set MODEL.COMPILE to off"
        )
    if backend == "inductor" and device == "cuda" and find_spec("triton") is None:
        raise ConfigError(
            "MODEL.COMPILE is inductor, which needs Triton for a CUDA device, but it is not installed.\n"
            "  fix: pip install triton, or set MODEL.COMPILE to off"
        )


def _batch_size(value: Any) -> int:
    """Return the number of images of a batch, or of rows of a tensor."""
    images = value.get("images") if isinstance(value, dict) else value
    return len(images) if isinstance(images, torch.Tensor) and images.dim() else 0


def _counts() -> tuple[int, int]:
    """Return the numbers of compiled frames and of graph breaks in this process."""
    utils = torch._dynamo.utils
    return utils.counters["frames"]["total"], len(utils.graph_break_reasons)


def _describe(region: _Region, counted: tuple[int, int], seconds: float) -> str:
    """Describe a compilation since the counts ``counted``: its time, and the reasons of breaks and recompilations."""
    utils = torch._dynamo.utils
    frames, breaks = (now - before for now, before in zip(_counts(), counted, strict=True))
    reasons: Counter[str] = Counter()
    for graph_break in utils.graph_break_reasons[len(utils.graph_break_reasons) - breaks :]:
        frame = graph_break.user_stack[-1] if graph_break.user_stack else None
        where = f" at {frame.filename}:{frame.lineno}" if frame else ""
        reasons[f"graph break{where}: {_first_line(graph_break.reason)}"] += 1
    recompilations = 0
    for metrics in utils.get_compilation_metrics()[-frames:]:
        if reason := getattr(metrics, "recompile_reason", None):  # PyTorch before 2.7 does not have it
            recompilations += 1
            what = f"recompilation of {metrics.co_name}" if metrics.co_name else "no compilation, too many graphs"
            reasons[f"{what}: {_first_line(reason)}"] += 1
    phase = "training" if region.module.training else "evaluation"
    head = (
        f"compiled {region.name} for {phase} in {seconds:.1f} s of warm-up ({region.state.description}): "
        f"{plural(frames, 'graph')}, {plural(breaks, 'graph break')}, {plural(recompilations, 'recompilation')}"
    )
    if region.state.folder:
        head += f"; compiled code is kept in {region.state.folder} (TORCHINDUCTOR_CACHE_DIR)"
    return "\n  ".join([head, *(f"{count} x {text}" if count > 1 else text for text, count in reasons.items())])


def _first_line(error: Any) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _clone(result: Any) -> Any:
    if isinstance(result, dict):
        return {name: _clone(value) for name, value in result.items()}
    return result.clone() if isinstance(result, torch.Tensor) else result
