from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import WeightsError
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.models.interface import CausalModel
from millrace_shard.weights.quantized.made_at_load import (
    ELEMENTS_PER_PASS,
    METHODS,
    NF4,
    fp4_values,
    quantized,
)
from millrace_testing.models.models import Driver, logprobs, prompt_of, read_model, save_tiny

BITS = {
    "int4": 4,
    "bitsandbytes-nf4": 4,
    "bitsandbytes-fp4": 4,
    "bitsandbytes": 8,
    "eetq": 8,
    "fp8": 8,
}
LARGEST_ERROR = {4: 0.13, 8: 0.03}
"""Of a normal distribution, as a part of its deviation: root of the mean square."""


def weight(outputs: int = 32, inputs: int = 192) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))


def made(method: str, values: Tensor) -> QuantizedTensor:
    return quantized(values, METHODS[method].linear)


@pytest.mark.parametrize("method", METHODS)
def test_weights_quantised_at_load_are_close_to_the_originals(method: str) -> None:
    values = weight()
    result = made(method, values)
    assert result.bits == BITS[method]
    error = (result.dequantized() - values).square().mean().sqrt()
    assert error < LARGEST_ERROR[result.bits]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "int4"])
def test_no_other_code_of_a_number_is_nearer(method: str) -> None:
    values = weight(8, 128).to(torch.bfloat16)
    result = made(method, values)
    groups = torch.arange(128) // result.group_size
    all_values = result.values.nan_to_num(torch.inf)[:, None, None] * result.scales[:, groups]
    nearest = (all_values - values.float()).abs().nan_to_num(torch.inf).amin(0)
    if method in {"bitsandbytes", "eetq"}:
        all_values[128] = torch.inf
    own = (result.dequantized() - values.float()).abs()
    torch.testing.assert_close(own, nearest, rtol=1e-4, atol=1e-6)


def test_scales_of_int4_have_the_least_squared_error_for_their_codes() -> None:
    values = weight(4, 128).double()
    result = made("int4", values)
    codes = (result.codes.double() - 8).view(4, 2, 64)
    groups = values.view(4, 2, 64)
    fitted = torch.linalg.lstsq(codes.unsqueeze(-1), groups.unsqueeze(-1)).solution.flatten(1)
    torch.testing.assert_close(result.scales.double(), fitted, rtol=1e-5, atol=0)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    plain = (groups / scale).round() * scale
    error = (result.dequantized().double() - values).square().sum()
    assert error < 0.9 * (plain - groups).square().sum()


def test_tables_match_bitsandbytes() -> None:
    """Against the table in its fixtures, which its own library has read."""
    fixtures = Path(__file__).parent / "fixtures"
    for name, table in (("nf4", torch.tensor(NF4)), ("fp4", fp4_values())):
        stored = load_file(fixtures / f"{name}.safetensors")
        bytes_ = stored["weight"].flatten()
        codes = torch.stack((bytes_ >> 4, bytes_ & 15), -1).view(64, 128).int()
        scales = stored["weight.absmax"].repeat_interleave(64).view(64, 128)
        assert torch.equal(table[codes] * scales, stored["expected"])


@pytest.mark.parametrize("method", METHODS)
def test_zeros_stay_zeros(method: str) -> None:
    values = weight(4, 128)
    values[1] = 0
    result = made(method, values).dequantized()
    assert result.isfinite().all()
    assert not result[1].any()


@pytest.mark.parametrize("method", METHODS)
def test_transposed_experts_have_the_same_codes(method: str) -> None:
    """Files of gpt-oss have them; torch warns of numbers that are not contiguous in a search."""
    quantize = METHODS[method].linear
    transposed = weight(192, 32).t()
    result, expected = (quantized(each, quantize) for each in (transposed, transposed.contiguous()))
    assert torch.equal(result.codes, expected.codes)
    assert torch.equal(result.scales, expected.scales)
    assert result.codes.is_contiguous()


def test_rows_are_quantized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values = weight(9, 100)
    assert values.numel() < ELEMENTS_PER_PASS
    whole = made("int4", values)
    monkeypatch.setattr("millrace_shard.weights.quantized.made_at_load.ELEMENTS_PER_PASS", 250)
    pieces = made("int4", values)
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales, whole.scales)


def load(folder: Path, method: str | None, group: ProcessGroup | None = None) -> CausalModel:
    return read_model(folder, group=group, quantize=method)


def answers(model: CausalModel) -> Tensor:
    driver = Driver(model, PlainKernels(deterministic=True), dtype=torch.float32)
    return logprobs(driver.generate([prompt_of(9)], 2)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_that_of_its_rounded_weights(
    method: str,
    tied: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=tied)
    caplog.set_level(logging.INFO)
    with torch.inference_mode():
        model = load(tmp_path, method)
        result, plain = answers(model), answers(load(tmp_path, None))
    assert model.info.quantization == method
    assert f"--quantize {method}: {METHODS[method].summary}" in caplog.text
    assert not torch.allclose(result, plain, atol=1e-3)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = METHODS[method].head
    for name, values in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = made(method, values).dequantized()
    if head is not None and not tied:
        tensors["lm_head.weight"] = quantized(tensors["lm_head.weight"], head).dequantized()
    save_file(tensors, path, {"format": "pt"})
    with torch.inference_mode():
        expected = answers(load(tmp_path, None))
    if head is not None and tied:
        # The embedding keeps its numbers, and the head has others.
        assert not torch.equal(result, expected)
        torch.testing.assert_close(result, expected, atol=0.3, rtol=0)
    else:
        assert torch.equal(result, expected)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, path, {"format": "pt"})
    for method in METHODS:
        with pytest.raises(WeightsError, match=r"tensor model.layers.1.mlp.up_proj.weight.*finite"):
            load(tmp_path, method)
