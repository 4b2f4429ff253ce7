"""Run CUDA code paths without a device: PyTorch's fake tensors have a device, a shape and a dtype, but no values.

Operations on tensors of two devices fail as they do on a GPU. Operations that make the host wait for values from the
GPU fail or are counted. With ``values``, each operation is also computed on the CPU, for code whose tensor shapes
depend on values. Fake tensors cannot test streams, pinned memory, events, generators, NCCL, or the backward pass.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

DEVICE = torch.device("cuda", 0)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


_ValueDependent = (DataDependentOutputException, DynamicOutputShapeException)


class ForcedAutocast(torch.autocast):
    """Autocast that stays enabled on a machine without CUDA."""

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **options: Any
    ) -> None:
        super().__init__("cpu", torch.bfloat16, enabled=False)
        self.device, self.fast_dtype, self._enabled = device_type, dtype or torch.float16, enabled


class DeviceReads(TorchDispatchMode):
    """Count transfers between host and device, and supply the values of scalars read by the host.

    Args:
        mode: creates the fake tensors.
        answer: function that maps a number of values to the values that the host reads.

    Attributes:
        count: number of transfers from the device to the host; a ``tolist()`` counts once, regardless of the number of
            values.
        uploads: number of transfers from the host to the device.
        blocking_uploads: number of these that are not asynchronous transfers from pinned memory.
        device_draws: number of operations that draw random numbers on the device.
    """

    def __init__(self, mode: FakeTensorMode, answer: Callable[[int], list[float]]) -> None:
        super().__init__()
        self.mode = mode
        self.answer = answer
        self.count = self.uploads = self.blocking_uploads = self.device_draws = 0
        self._pinned: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or _is_device(leaf) for leaf in leaves):
            return self._on_host(func, args, kwargs or {})
        self.device_draws += torch.Tag.nondeterministic_seeded in func.tags
        self._count_uploads(func, args, kwargs or {})
        if args and type(args[0]) is torch.Tensor:  # else FakeTensorMode would copy a constant to the device
            args = (self.mode.from_tensor(args[0]), *args[1:])
        if func is torch.ops.aten.equal.default:
            return bool(self.read(1)[0])
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda:
            (value,) = self.read(1)
            return value if args[0].dtype.is_floating_point else int(value)
        out = func(*args, **(kwargs or {}))
        if func in _COPIES or func is torch.ops.aten.to.dtype_layout:
            source = next(arg for arg in reversed(args) if isinstance(arg, torch.Tensor))
            self.count += source.is_cuda and not out.is_cuda
        return out

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on real host tensors. Pinned memory, which needs CUDA, is recorded but not allocated."""
        pinned = kwargs.get("pin_memory", False)
        with _disable_current_modes():
            out = func(*args, **kwargs | ({"pin_memory": False} if pinned else {}))
        if pinned:
            self._pinned.add(out.untyped_storage().data_ptr())
        return out

    def _count_uploads(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count the host tensors that an operation copies to the device."""
        if func in _INDEXING and args[0].is_cuda:
            sources = [index for index in args[1] if index is not None and not index.is_cuda]
        elif func in _COPIES:
            source = next(arg for arg in reversed(args) if isinstance(arg, torch.Tensor))
            target = args[0].device if func is torch.ops.aten.copy_.default else kwargs.get("device", source.device)
            sources = [source] if torch.device(target).type == "cuda" and not source.is_cuda else []
        else:
            return
        asynchronous = kwargs.get("non_blocking", False) or (
            func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]
        )
        for source in sources:
            is_pinned = type(source) is torch.Tensor and source.untyped_storage().data_ptr() in self._pinned
            self.uploads += 1
            self.blocking_uploads += not (is_pinned and asynchronous)

    def read(self, values: int) -> list[float]:
        """Count one transfer of ``values`` scalars, and return their values."""
        self.count += 1
        return self.answer(values)


class DeviceValues(DeviceReads):
    """Device reads with values: each operation is also computed on the CPU.

    The shapes that depend on values, and the scalars read by the host, are those of this computation. Required for
    code such as ``features[mask]``, ``nonzero`` and ``unique``, which count as reads.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or _is_device(leaf) for leaf in leaves):
            return self._on_host(func, args, kwargs or {})
        real_args, real_kwargs = tree_map(_value, (args, kwargs or {}))
        try:
            out, depends_on_values = super().__torch_dispatch__(func, types, args, kwargs), False
        except _ValueDependent:
            out, depends_on_values = None, True
        with _disable_current_modes():
            real = func(*real_args, **real_kwargs)
        if depends_on_values:
            self.count += 1
            if not isinstance(real, torch.Tensor | tuple):
                return real
            device = next(leaf.device for leaf in leaves if isinstance(leaf, FakeTensor))
            with _disable_current_modes():
                out = tree_map(lambda value: self.mode.from_tensor(value.to("meta")), real)  # no memory on the device
            out = tree_map(lambda value: FakeTensor(self.mode, value, device), out)
        elif func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.equal.default:
            return real
        for fake, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(fake, FakeTensor):
                assert fake.shape == value.shape and fake.dtype == value.dtype, (func, fake, value.shape, value.dtype)
                fake.value = value
        if isinstance(out, FakeTensor) and out.device.type == "cpu":
            return real
        return out


def _value(leaf: Any) -> Any:
    """Return the value of a fake tensor, and the CPU for the device."""
    if isinstance(leaf, FakeTensor):
        return leaf.value
    return torch.device("cpu") if _is_device(leaf) else leaf


class HostOperand(TorchDispatchMode):
    """Replace one operand on the device with a copy on the host, like code that does not move a tensor to the device.

    Args:
        position: number of the operation among those with at least two operands on the device; None replaces nothing.

    Attributes:
        count: number of these operations.
    """

    def __init__(self, position: int | None = None) -> None:
        super().__init__()
        self.position = position
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten(args)
        on_device = [isinstance(leaf, FakeTensor) and leaf.is_cuda and leaf.ndim > 0 for leaf in leaves]
        if sum(on_device) > 1:
            if self.count == self.position:
                last = max(index for index, moved in enumerate(on_device) if moved)
                leaves[last] = getattr(leaves[last], "value", torch.zeros(leaves[last].shape, dtype=leaves[last].dtype))
            self.count += 1
        return func(*tree_unflatten(leaves, structure), **(kwargs or {}))


class _FakeBackward(TorchFunctionMode):
    """Replace the backward pass, which needs a CUDA driver: set a constant gradient for each parameter of the loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            for parameter in reached_parameters(args[0]):
                parameter.grad = torch.full_like(parameter, 1e-3)
            return None
        if func == torch.Tensor.data.__set__ and hasattr(args[1], "value"):  # is not dispatched
            args[0].value = args[1].value
        return func(*args, **(kwargs or {}))


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def reached_parameters(loss: torch.Tensor) -> list[torch.Tensor]:
    """List the leaf tensors of the autograd graph of ``loss``."""
    found, seen, stack = [], set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            stack.extend(parent for parent, _ in node.next_functions)
    return found


@contextlib.contextmanager
def fake_cuda(
    monkeypatch: Any, answer: Callable[[int], list[float]] = lambda count: [1.0] * count, values: bool = False
) -> Iterator[DeviceReads]:
    """Create only fake tensors and enable CUDA autocast.

    Args:
        monkeypatch: the fixture of pytest.
        answer: see ``DeviceReads``. Default 1 for every value. Not used with ``values``.
        values: if True, also compute on the CPU; see ``DeviceValues``. Default False.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    reads = (DeviceValues if values else DeviceReads)(mode, answer)

    def tolist(tensor: FakeTensor) -> list[float]:
        answered = reads.read(tensor.numel())
        return tensor.value.tolist() if values else answered

    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", ForcedAutocast)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 25))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        patch.setattr(FakeTensor, "tolist", tolist)
        # Without cuDNN, batch normalization is an operation that a CPU has as well.
        with torch.backends.cudnn.flags(enabled=not values), mode, reads, _FakeBackward():
            yield reads


def to_fake_cuda(model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers of a model with fake ones on the device; tied tensors remain tied."""
    moved: dict[int, torch.Tensor] = {}
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in moved:
                        fake = tensor.detach().to(DEVICE)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        moved[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    tensors[name] = moved[id(tensor)]
    return model
