"""Selective scan: values of the authors' program and of the definition in float64, gradients, memory, precision."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastamp.layers import selective_scan

REFERENCE = Path(__file__).parents[1] / "reference" / "vmamba"
MODULE = importlib.import_module("fastamp.layers.selective_scan")  # the package has a function of this name
NAMES = ("u", "delta", "A", "B", "C", "D", "delta_bias")


def reference(name):
    with np.load(REFERENCE / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def relative_error(value, expected):
    return float((value.double() - expected).detach().abs().max() / expected.detach().abs().max())


def definition(u, delta, A, B, C, D=None, delta_bias=None, *, delta_softplus=True):
    """The definition, position by position."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    B, C = (x.repeat_interleave(u.shape[1] // x.shape[1], 1).unbind(3) for x in (B, C))
    state, outputs = torch.zeros_like(A), []
    for B_l, C_l, u_l, delta_l in zip(B, C, u.unbind(2), delta.unbind(2), strict=True):
        step = delta_l[..., None]
        state = (step * A).exp() * state + step * B_l * u_l[..., None]
        outputs.append((C_l * state).sum(2))
    return torch.stack(outputs, 2) + (0 if D is None else D[:, None] * u)


def random_inputs(batch, groups, channels, states, length, dtype=torch.float32):
    """Inputs of the size of a trained model's: steps of 0.001 to 0.1 and larger, A = -1 .. -N."""
    torch.manual_seed(0)
    wide = groups * channels
    A = -torch.arange(1, states + 1, dtype=dtype).repeat(wide, 1)
    u, delta = torch.randn(2, batch, wide, length, dtype=dtype)
    B, C = torch.randn(2, batch, groups, states, length, dtype=dtype)
    return [u, delta, A, B, C, torch.randn(wide, dtype=dtype), torch.empty(wide, dtype=dtype).uniform_(-6.9, 0)]


def with_gradients(function, inputs, grad):
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    return output.detach(), torch.autograd.grad(output, inputs, grad.to(output.dtype))


@pytest.mark.parametrize("name", ["scan1", "scan2"])
def test_values_and_gradients_of_the_authors_program(name):
    known = reference(name)
    for dtype, tolerance, gradient_tolerance in ((torch.float64, 1e-10, 1e-10), (torch.float32, 1e-5, 1e-4)):
        inputs = [known[key].to(dtype) for key in NAMES]
        output, grads = with_gradients(selective_scan, inputs, known["out_grad"])
        assert output.dtype == dtype
        assert relative_error(output, known["out_float64"]) < tolerance
        for key, grad in zip(NAMES, grads, strict=True):
            assert relative_error(grad, known[f"grad_{key}"]) < gradient_tolerance, key
        assert relative_error(selective_scan(*inputs[:5]), known["out_no_D_no_bias"]) < tolerance
        positive = selective_scan(inputs[0], known["delta_positive"].to(dtype), *inputs[2:6], delta_softplus=False)
        assert relative_error(positive, known["out_no_softplus_no_bias"]) < tolerance


@pytest.mark.integration  # the definition takes seconds
def test_values_and_gradients_of_the_definition_at_8192_positions():
    for states in (1, 4):
        inputs = random_inputs(1, 2, 3, states, 8192)
        grad = torch.randn_like(inputs[0])
        expected, expected_grads = with_gradients(definition, [x.double() for x in inputs], grad)
        output, grads = with_gradients(selective_scan, inputs, grad)
        assert relative_error(output, expected) < 1e-5
        for name, value, known in zip(NAMES, grads, expected_grads, strict=True):
            assert relative_error(value, known) < 1e-4, name


@pytest.mark.parametrize("elements", [1, 2**21])
def test_every_length_matches_the_definition(monkeypatch, elements):
    # With 1 element, a segment is one chunk of 16 positions.
    monkeypatch.setattr(MODULE, "_SEGMENT_ELEMENTS", elements)
    for length in (1, 2, 15, 16, 17, 33, 256, 273):
        for optional in (5, 6, 7):
            inputs = random_inputs(2, 2, 2, 16 if length == 33 else 2, length, torch.float64)[:optional]
            grad = torch.randn_like(inputs[0])
            (expected, expected_grads), (output, grads) = (
                with_gradients(function, inputs, grad) for function in (definition, selective_scan)
            )
            torch.testing.assert_close((output, *grads), (expected, *expected_grads), rtol=1e-9, atol=1e-11)


def test_gradients_match_finite_differences():
    inputs = [x.requires_grad_() for x in random_inputs(1, 2, 2, 2, 18, torch.float64)]
    assert torch.autograd.gradcheck(selective_scan, inputs, fast_mode=True)
    for weight in (torch.ones((), dtype=torch.float64), inputs[5].sum()):  # constant or not
        value = (weight * selective_scan(*inputs)).sum() + inputs[0].square().sum()
        with pytest.raises(RuntimeError, match="second derivative"):  # not silently without the part of the scan
            torch.autograd.grad(value, inputs[:1], create_graph=True)


def test_views_and_empty_batches():
    inputs = random_inputs(2, 2, 3, 2, 40)
    expected = selective_scan(*inputs)
    assert not (wide := inputs[0].repeat_interleave(2, 2)[..., ::2]).is_contiguous()
    assert torch.equal(selective_scan(wide, *inputs[1:]), expected)
    first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:2]]
    assert torch.equal(selective_scan(*first, *inputs[2:]), expected)
    empty = [x[:0].requires_grad_() if x.dim() > 2 else x.clone().requires_grad_() for x in inputs]
    output = selective_scan(*empty)
    assert output.shape == (0, 6, 40)
    assert not any(grad.any() for grad in torch.autograd.grad(output.sum(), empty))


def test_extreme_steps_and_values_that_are_not_finite():
    inputs = random_inputs(1, 2, 2, 2, 64)
    for shift in (1e4, 100.0, -100.0):  # exp(delta A) is 0, or delta is 0
        shifted = [inputs[0], inputs[1] + shift, *inputs[2:]]
        output, grads = with_gradients(selective_scan, shifted, inputs[0])
        expected, expected_grads = with_gradients(definition, [x.double() for x in shifted], inputs[0])
        for value, known in zip((output, *grads), (expected, *expected_grads), strict=True):
            assert value.isfinite().all()
            assert (value - known).abs().max() <= 1e-5 * known.abs().max() + 1e-30
    for value in (torch.inf, torch.nan):
        for name in (0, 1, 3, 4):
            for D in (inputs[5], None):
                bad = [*inputs[:5], D, inputs[6]]
                bad[name] = inputs[name].clone()
                bad[name][..., 1, 20] = value
                assert torch.equal(selective_scan(*bad).isfinite(), definition(*bad).isfinite()), (value, NAMES[name])


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_memory_is_linear_in_the_length_and_does_not_grow_with_the_states(monkeypatch):
    monkeypatch.setattr(MODULE, "_SEGMENT_ELEMENTS", 2**12)

    def measure(function, states, length):
        inputs = [x.requires_grad_() for x in random_inputs(1, 1, 16, states, length)]
        saved = {}

        def count(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), LargestTensor() as largest:
            torch.autograd.grad(function(*inputs).sum(), inputs)
        return sum(saved.values()), largest.elements

    (one, _), (two, elements), (many, most) = (
        measure(selective_scan, *sizes) for sizes in ((1, 1024), (1, 2048), (16, 2048))
    )
    assert 1.9 < two / one < 2.1
    assert many < 3 * two  # B and C have 16 states; u and the step sizes have none
    assert elements <= 16 * 2048
    assert most <= 16 * 2048  # the states together are 16 times as many
    kept, _ = measure(definition, 16, 256)  # negative control
    assert kept > measure(selective_scan, 16, 256)[0] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_in_every_mode(dtype):
    known = reference("overflow1")
    inputs = [known[name] for name in NAMES]
    half = [x.half() for x in inputs[:2]] + [inputs[2]] + [x.half() for x in inputs[3:5]] + inputs[5:]
    output = selective_scan(*half)
    assert output.dtype == torch.float32
    assert relative_error(output, known["out_float64"]) < 1e-5
    assert torch.equal(~output.half().isfinite(), known["nonfinite_half_output"])
    for states in (1, 4):  # with 4 states, a contraction under autocast would be in low precision
        inputs = random_inputs(2, 2, 3, states, 40)
        expected = selective_scan(*inputs)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), torch.autocast("cpu", dtype=dtype):
                assert torch.equal(selective_scan(*(x.requires_grad_(gradients) for x in inputs)), expected)
        low = [x.detach().to(dtype) for x in inputs]
        torch.testing.assert_close(selective_scan(*low), selective_scan(*(x.float() for x in low)), rtol=0, atol=0)


class Scan(torch.nn.Module):
    def forward(self, u, delta, A, B, C, D, delta_bias):
        return selective_scan(u, delta, A, B, C, D, delta_bias)


@pytest.mark.integration
def test_exported_files_return_the_same_values():
    onnxruntime = pytest.importorskip("onnxruntime")
    for states in (1, 4):
        inputs, more = (tuple(random_inputs(batch, 2, 3, states, 100)) for batch in (2, 3))
        batch = torch.export.Dim("batch")
        shapes = tuple({0: batch} if x.dim() > 2 else None for x in inputs)
        program = torch.export.export(Scan(), inputs, dynamic_shapes=shapes, strict=False)
        assert relative_error(program.module()(*more), selective_scan(*more)) < 1e-6
        assert relative_error(torch.jit.trace(Scan(), inputs)(*more), selective_scan(*more)) < 1e-6
        trained = tuple(x.clone().requires_grad_() for x in inputs)  # as parameters, without no_grad
        exported = torch.export.export(Scan(), trained, dynamic_shapes=shapes, strict=False).module()
        assert relative_error(exported(*more), selective_scan(*more)) < 1e-6
        content = torch.onnx.export(program, (), dynamo=True, verbose=False).model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), more, strict=True)}
        assert relative_error(torch.from_numpy(session.run(None, feeds)[0]), selective_scan(*more)) < 1e-6


@pytest.mark.integration
def test_compiled_scan_returns_the_same_values_and_gradients():
    inputs = random_inputs(2, 2, 3, 2, 40)
    grad = torch.randn_like(inputs[0])
    compiled = torch.compile(selective_scan, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(with_gradients(compiled, inputs, grad), with_gradients(selective_scan, inputs, grad))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), selective_scan(*inputs))
