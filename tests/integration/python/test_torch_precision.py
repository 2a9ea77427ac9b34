"""Experts in a low precision, against what torchao and ml_dtypes make of the same rows and weights.

The model is tests/golden/tiny-olmoe, served with --precision by two servers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import expertmesh
import ml_dtypes
import numpy as np
import pytest
import torch
from checks import relative
from expertmesh.torch import from_pretrained
from safetensors.torch import load_file
from torch.nn.functional import silu

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
sys.path.insert(0, str(GOLDEN))
import make_quantize_golden as golden  # noqa: E402
import train_tiny_olmoe as tiny  # noqa: E402

MODEL = GOLDEN / "tiny-olmoe"
LAYERS = range(4)


class Format(NamedTuple):
    pad_multiple: int
    bound: float  # relative error against the layer that is not quantised


FORMATS = {
    "fp8_rowwise": Format(16, 0.08),
    "fp8_block128": Format(128, 0.08),
    "mxfp8": Format(32, 0.09),
    "mxfp8_rceil": Format(32, 0.08),
}
# By the dtype of the request: numpy's, what activations are rounded to before they are quantised (F16 is
# computed as F32), and the relative error against the emulation.
REQUESTS = {
    torch.float32: (np.float32, torch.float32, 1e-6),
    torch.bfloat16: (ml_dtypes.bfloat16, torch.bfloat16, 3e-4),
    torch.float16: (np.float16, torch.float32, 1e-4),
}
# Of tokens with an activation so near the middle between two codes that the order of a sum decides.
MAX_UNCLEAR = 0.1
MAX_LOSS = 0.01  # nats per byte, above bf16's


def quantised(precision: str, rows: torch.Tensor, block_rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; weights have blocks of more than one row."""
    if precision == "fp8_rowwise":
        return golden.rowwise(precision, rows)
    if precision == "fp8_block128":
        return golden.block128(rows, block_rows)
    mode = golden.ScaleCalculationMode
    return golden.mx(precision, rows, mode.FLOOR if precision == "mxfp8" else mode.RCEIL)


def dequantised(precision: str, rows: torch.Tensor, block_rows: int = 1) -> torch.Tensor:
    """The values, exact in float64, that the quantised rows stand for."""
    codes, scales = quantised(precision, rows, block_rows)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu).float()
    width = rows.shape[1]
    channels = {"fp8_rowwise": width, "fp8_block128": 128}.get(precision, 32)
    factors = scales.double().repeat_interleave(channels, 1)[:, :width]
    return codes.view(torch.float8_e4m3fn).float().double() * factors


def same_codes(precision: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Which rows are quantised to the same codes, with scales that are hardly other."""
    given, expected = dequantised(precision, left), dequantised(precision, right)
    return torch.isclose(given, expected, rtol=1e-5, atol=0).all(1)


class Emulation:
    """The experts of one layer in float64, on quantised weights."""

    def __init__(self, precision: str, tensors: dict[str, torch.Tensor], layer: int) -> None:
        self.precision = precision
        self.experts = [
            [
                dequantised(
                    precision, tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"], 128
                )
                for name in ("gate", "up", "down")
            ]
            for expert in range(16)
        ]

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's output for chosen experts, and which tokens are clear: what fp32 may lose of their
        activations changes no code."""
        inner = REQUESTS[x.dtype][1]
        tokens, slots = ids.shape
        rows = dequantised(self.precision, x)
        h = torch.zeros(tokens, slots, rows.shape[1], dtype=torch.float64)
        lost = torch.zeros_like(h)
        chosen = [(ids == expert).nonzero(as_tuple=True) for expert in range(len(self.experts))]
        for (token, slot), (gate, up, _) in zip(chosen, self.experts):
            row = rows[token]
            g, u = row @ gate.T, row @ up.T
            # A sum of 128 products that are rounded one after the other.
            lost_g, lost_u = ((row**2 @ (matrix**2).T).sqrt() * 2.0**-21 for matrix in (gate, up))
            sigmoid = g.sigmoid()
            slope = sigmoid * (1 + g * (1 - sigmoid))
            h[token, slot] = silu(g) * u
            lost[token, slot] = (slope * u).abs() * lost_g + silu(g).abs() * lost_u
            lost[token, slot] += h[token, slot].abs() * 2.0**-21
        flat, slack = h.flatten(0, 1), lost.flatten(0, 1)
        between = dequantised(self.precision, flat.to(inner)).view(h.shape)
        clear = torch.ones(tokens * slots, dtype=torch.bool)
        for other in (flat - slack, flat + slack):
            clear &= same_codes(self.precision, flat.to(inner), other.to(inner))
        output = torch.zeros_like(rows)
        for (token, slot), (_, _, down) in zip(chosen, self.experts):
            y = (between[token, slot] @ down.T).to(inner).double()
            output.index_add_(0, token, weights[token, slot, None].double() * y)
        return output.to(x.dtype), clear.view(tokens, slots).all(1)


@pytest.fixture(scope="module")
def tensors():
    return load_file(MODEL / "model.safetensors")


@pytest.fixture(scope="module")
def captured():
    return load_file(MODEL / "captured.safetensors")


@pytest.mark.parametrize("precision", FORMATS)
def test_blocks(cluster, tensors, captured, precision):
    """Every layer, in requests of every dtype: stage by stage, and against the layer in fp32."""
    expected_format = FORMATS[precision]
    with expertmesh.Client(cluster(MODEL, 2, "--precision", precision)) as client:
        for layer in client.model().layers:
            assert (layer.format, layer.pad_multiple) == (precision, expected_format.pad_multiple)
        for layer in LAYERS:
            emulation = Emulation(precision, tensors, layer)
            for dtype, (numpy_dtype, _, bound) in REQUESTS.items():
                x = captured[f"layer.{layer}.hidden_states"].to(dtype)
                result = client.forward(layer, x.float().numpy().astype(numpy_dtype))
                output = torch.from_numpy(result.output.astype(np.float32))
                ids = torch.from_numpy(result.topk_ids)
                weights = torch.from_numpy(result.topk_weights)
                if dtype == torch.float32:  # gates are not quantised
                    assert torch.equal(ids, captured[f"layer.{layer}.topk_ids"])
                    assert relative(weights, captured[f"layer.{layer}.topk_weights"]) <= 1e-6
                expected, clear = emulation(x, ids, weights)
                error = relative(output[clear], expected[clear])
                loss = relative(output, captured[f"layer.{layer}.output"])
                print(
                    f"{precision} layer {layer} {str(dtype).removeprefix('torch.'):8}: error {error:.1e}, "
                    f"of all tokens {relative(output, expected):.1e}, {(~clear).double().mean():6.2%} unclear; "
                    f"against fp32 {loss:.4f}"
                )
                assert error <= bound
                assert relative(output, expected) <= 3e-4  # a few codes are others
                if dtype != torch.bfloat16:
                    assert (~clear).double().mean() <= MAX_UNCLEAR
                assert 0.005 <= loss <= expected_format.bound


def test_some_layers(cluster, captured):
    """Those that are not named compute what they compute natively."""
    options = ("--precision", "mxfp8:layers=1,3", "--pad-multiple", "64")
    with (
        expertmesh.Client(cluster(MODEL, 2)) as native,
        expertmesh.Client(cluster(MODEL, 2, *options)) as client,
    ):
        assert client.model().model_fingerprint != native.model().model_fingerprint
        layers = [(layer.format, layer.pad_multiple) for layer in client.model().layers]
        assert layers == [("native", 1), ("mxfp8", 64)] * 2
        for layer in LAYERS:
            x = captured[f"layer.{layer}.hidden_states"].float().numpy()
            left, right = client.forward(layer, x), native.forward(layer, x)
            assert np.array_equal(left.topk_ids, right.topk_ids)
            assert np.array_equal(left.output, right.output) == (layer % 2 == 0)


def held_out_text() -> bytes:
    """All of it where `train_tiny_olmoe.py corpus` has fetched it, else the part that is in the repository."""
    corpus = tiny.DEFAULT_WORK / "jargon.txt"
    return tiny.read_corpus(corpus)[1] if corpus.is_file() else (MODEL / "captured.txt").read_bytes()


def test_loss_of_the_language_model(cluster):
    """The model in bf16, its MoE layers remote, on text that it has not been trained on."""
    text = held_out_text()
    losses = {}
    for precision in ("native", *FORMATS):
        with expertmesh.Client(cluster(MODEL, 2, "--precision", precision)) as client:
            losses[precision] = tiny.nats_per_byte(from_pretrained(MODEL, client), text)
    print(f"\nloss on {len(text)} bytes of held-out text, nats per byte")
    for precision, loss in losses.items():
        print(f"{precision:14} {loss:.4f} {loss - losses['native']:+.4f}")
    assert losses["native"] < 2
    for precision in FORMATS:
        assert losses[precision] != losses["native"]
        assert abs(losses[precision] - losses["native"]) <= MAX_LOSS
