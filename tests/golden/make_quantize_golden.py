#!/usr/bin/env python3
"""Writes quantize.safetensors: rows, and the codes and scales that others make of them.

usage: make_quantize_golden.py [FILE]
(needs numpy, ml_dtypes, safetensors, torch==2.13.0 and torchao==0.18.0)

fp8_rowwise, mxfp8 and mxfp8_rceil come from torchao on the CPU, fp8_block128 from fp32 arithmetic
of numpy and ml_dtypes. torchao rounds logarithms, and its RCEIL blocks of the smallest and of the
largest exponent may be zeros or infinite; where common/numerics/quantize.h has it otherwise, and
nowhere else, the file has what exact arithmetic gives. How many scales and codes that concerns is
printed.

Tensors are named DTYPE.rows, DTYPE.FORMAT.codes and DTYPE.FORMAT.scales; `weights` are BF16 with
blocks of 128 x 128. F16 rows go to torchao widened where it does not take them.
"""

import pathlib
import sys

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

K = 172  # 128 + 44, and 5 blocks of 32 + 12
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def step(values, dtype, by):
    """The `by`-th neighbours, away from zero, of non-negative values that `dtype` has."""
    values = torch.as_tensor(values, dtype=torch.float64).to(dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    return (values.view(integer) + by).view(dtype).to(torch.float64)


def random_rows(dtype, rng):
    info = torch.finfo(dtype)
    lowest, highest = np.log2(info.smallest_normal) - 8, np.log2(info.max)
    rows = [rng.normal(size=K) * scale for scale in (1.0, 0.02, 300.0)]
    # Every exponent in one row; a few in each of its blocks.
    rows.append(rng.normal(size=K) * 2.0 ** rng.uniform(lowest, highest - 3, K))
    rows.append(rng.normal(size=K) * 2.0 ** (rng.uniform(-12, 0, K)))
    for exponent in (lowest, lowest + 6, lowest + 11, lowest + 16, lowest + 22):
        rows.append(rng.uniform(-1, 1, K) * 2.0**exponent)
    # Up to the largest number, and one block of it among small ones.
    rows.append(rng.uniform(-1, 1, K) * float(info.max))
    rows.append(rng.uniform(-1, 1, K) * float(info.max) * 2.0**-12)
    rows[-1][70] = info.max
    return rows


def special_rows(dtype):
    info = torch.finfo(dtype)
    rows = [np.zeros(K), np.full(K, -0.0), np.full(K, float(info.max))]
    one = np.zeros(K)
    one[40] = -1.0
    one[168] = float(step(0.0, dtype, 1))
    rows.append(one)
    denormals = step(torch.zeros(K), dtype, 1) * torch.arange(K)
    rows += [denormals.numpy(), -denormals.flip(0).numpy()]

    # Halfway between codes and beside it, where every scale is 1: each block of 32 begins with 448.
    middles = (E4M3[:-1].double() + E4M3[1:].double()) / 2
    values = torch.cat([step(middles, dtype, by) for by in (-1, 0, 1)])
    signs = torch.where(torch.arange(len(values)) % 2 == 0, 1.0, -1.0)
    rows += blocks_of(values * signs, first=448.0)
    return rows


def blocks_of(values, first):
    """Rows of 5 blocks of 32 and one of 12, each with `first` and then the next values."""
    rows, values = [], list(values)
    while values:
        row = np.zeros(K)
        for k in range(K):
            row[k] = first if k % 32 == 0 else (values.pop(0) if values else 0.0)
        rows.append(row)
    return rows


def boundary_rows(dtype):
    """A largest magnitude of its own for each block, in rows of its size."""
    info = torch.finfo(dtype)
    amax = []
    wide = (-126, -119, -118, -110, -14, 0, 9, 119, 120)
    for exponent in (-20, -9, 0, 1, 9) if dtype == torch.float16 else wide:
        for mantissa in (1.0, 1.75, 1.8125, 1.875):  # of 448, of 464 and of 480
            centre = mantissa * 2.0**exponent
            if centre < float(info.max) / 256:
                amax += [float(step(centre, dtype, by)) for by in (-1, 0, 1, 2)]
    minima = (1e-4,) if dtype == torch.float16 else (1e-12, 1e-4)
    amax += [float(step(x, dtype, by)) for x in minima for by in (-1, 0, 1)]
    factors = np.array([1.0, -0.999, 0.5, 0.0625, 2.0**-9, -(2.0**-10), 1.5 * 2.0**-10])
    rows = []
    while amax:
        row = np.zeros(K)
        for block in range(6):
            size = amax.pop(0) if amax else 1.0
            width = min(32, K - 32 * block)
            row[32 * block : 32 * block + width] = size * np.resize(factors, width)
        rows.append(row)
    return rows


def rowwise_boundary_rows(dtype):
    """Rows whose 448 / amax is a power of two, or nearly so."""
    rows = []
    for exponent in (-10, 0, 3) if dtype == torch.float16 else (-30, -1, 0, 60, 117):
        for by in (-1, 0, 1):
            size = float(step(448.0 * 2.0**exponent, dtype, by))
            rows.append(size * np.resize([1.0, 0.3, -0.7, 2.0**-12], K))
    return rows


def quotient_rows(dtype):
    """Blocks of 128 whose scale is a small odd number: quotients that are exactly halfway between
    codes, which a multiplication with the scale's reciprocal would miss."""
    middles = (E4M3[:-1].double() + E4M3[1:].double()) / 2
    rows = []
    for scale in (3, 5, 7, 9, 11, 13, 15):
        values = middles * scale
        values[values.to(dtype).double() != values] = 0.0
        block = torch.cat([torch.tensor([448.0 * scale]), values])
        row = torch.zeros(K, dtype=torch.float64)
        row[: len(block)] = block
        row[128:] = block[-44:]
        row[128] = 448.0 * scale
        rows.append(row.numpy())
    return rows


def make_rows(dtype, rng):
    rows = random_rows(dtype, rng) + special_rows(dtype)
    rows += boundary_rows(dtype) + rowwise_boundary_rows(dtype) + quotient_rows(dtype)
    largest = torch.finfo(dtype).max
    rows = torch.from_numpy(np.stack(rows)).clamp(-largest, largest).to(dtype)
    assert torch.isfinite(rows).all()
    return rows


def codes_by_ml_dtypes(values):
    """Rounded to nearest even, at most 448."""
    clipped = np.clip(values, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(clipped.view(np.uint8))


def note(name, what, differing, allowed):
    """Says where torchao gives something else; everything else is an error."""
    assert not (differing & ~allowed).any(), f"{name}: {what} of torchao differ unexpectedly"
    if differing.any():
        print(f"{name}: {int(differing.sum())} of {differing.numel()} {what} are not torchao's")


def rowwise(name, rows):
    factor = tensor_to_scale(
        rows,
        torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    theirs = to_fp8_saturated(rows.to(torch.float32) * factor, torch.float8_e4m3fn)
    theirs = theirs.view(torch.uint8)
    amax = rows.to(torch.float64).abs().amax(-1, keepdim=True).numpy()
    quotient = (448.0 / np.maximum(amax, 1e-12)).astype(np.float32)
    mantissa, exponent = np.frexp(quotient)  # mantissa in [0.5, 1)
    exact = torch.from_numpy(np.ldexp(np.float32(1), exponent - 1))
    # Its logarithm rounds to a whole number from below.
    rounds = torch.from_numpy(mantissa > 1 - 2.0**-17)
    note(name, "scales", factor != exact, rounds)
    codes = codes_by_ml_dtypes(rows.to(torch.float32).numpy() * exact.numpy())
    note(name, "codes", codes != theirs, (factor != exact).expand_as(codes))
    return codes, 1 / exact


def block128(rows, block_rows=1):
    x = rows.to(torch.float32).numpy()
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((x.shape[0], -(-x.shape[1] // 128)), np.float32)
    for r in range(0, x.shape[0], block_rows):
        for b in range(scales.shape[1]):
            block = x[r : r + block_rows, 128 * b : 128 * (b + 1)]
            scale = np.maximum(np.abs(block).max(), np.float32(1e-4)) / np.float32(448)
            scales[r : r + block_rows, b] = scale
            block_codes = codes_by_ml_dtypes(block / scale).numpy()
            codes[r : r + block_rows, 128 * b : 128 * (b + 1)] = block_codes
    return torch.from_numpy(codes), torch.from_numpy(scales)


def exact_rceil(amax):
    """The exponent bytes of fp32 magnitudes, by the bits of the rounded product with 1 / 448."""
    bits = (amax * (np.float32(1) / np.float32(448))).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return np.where(exponent > 0, exponent + (mantissa > 0), mantissa > 0x400000).astype(np.uint8)


def mx(name, rows, mode):
    wide = rows if rows.dtype != torch.float16 else rows.to(torch.float32)
    width = -(-wide.shape[1] // 32) * 32
    wide = torch.nn.functional.pad(wide, (0, width - wide.shape[1]))
    scales, codes = to_mx(wide, torch.float8_e4m3fn, 32, mode)
    scales, codes = scales.view(torch.uint8), codes.view(torch.uint8)
    if mode == ScaleCalculationMode.RCEIL:
        x = wide.to(torch.float32).numpy()
        amax = np.abs(x).reshape(x.shape[0], -1, 32).max(-1)
        exact = exact_rceil(amax)
        mantissa, _ = np.frexp(amax / np.float32(448))
        near_power = torch.from_numpy((mantissa > 0.5) & (mantissa < 0.5 + 2.0**-17))
        exact_scales = torch.from_numpy(exact)
        note(name, "scales", scales != exact_scales, near_power)
        each = np.repeat(exact, 32, axis=1)
        values = np.ldexp(x, 127 - each.astype(np.int32))
        largest = np.where(each == 247, np.float32(240), np.float32(448))
        exact_codes = codes_by_ml_dtypes(np.clip(values, -largest, largest))
        other_scale = (scales != exact_scales).repeat_interleave(32, 1)
        zeros = torch.from_numpy(each == 0) & (codes & 0x7F == 0)
        not_finite = torch.from_numpy(each == 247) & (codes & 0x7F == 0x78)  # 256
        note(name, "codes (by scale)", (codes != exact_codes) & other_scale, other_scale)
        note(name, "codes (exponent 0)", (codes != exact_codes) & ~other_scale & ~not_finite, zeros)
        note(name, "codes (exponent 247)", (codes != exact_codes) & not_finite, not_finite)
        scales, codes = exact_scales, exact_codes
    return codes[:, : rows.shape[1]], scales


def check_rceil_quotient():
    """Multiplying by fl(1 / 448) gives the same exponents as dividing by 448."""
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    for exponent in (0, 1, 5, 6, 7, 8, 9, 10, 11, 127, 254):  # the quotient is denormal up to 9
        amax = ((np.uint32(exponent) << np.uint32(23)) | mantissas).view(np.float32)
        bits = (amax / np.float32(448)).view(np.uint32)
        high, low = bits >> 23, bits & 0x7FFFFF
        divided = np.where(high > 0, high + (low > 0), low > 0x400000)
        assert (divided == exact_rceil(amax)).all(), exponent


def main():
    check_rceil_quotient()
    rng = np.random.default_rng(2026)
    tensors = {}

    def add(name, codes, scales):
        tensors[f"{name}.codes"] = codes.contiguous().view(torch.float8_e4m3fn)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        tensors[f"{name}.scales"] = scales.contiguous()

    for name, dtype in DTYPES.items():
        rows = make_rows(dtype, rng)
        tensors[f"{name}.rows"] = rows
        add(f"{name}.fp8_rowwise", *rowwise(f"{name}.fp8_rowwise", rows))
        add(f"{name}.fp8_block128", *block128(rows))
        add(f"{name}.mxfp8", *mx(f"{name}.mxfp8", rows, ScaleCalculationMode.FLOOR))
        add(f"{name}.mxfp8_rceil", *mx(f"{name}.mxfp8_rceil", rows, ScaleCalculationMode.RCEIL))

    weights = torch.from_numpy(rng.normal(size=(131, 134)) * 2.0 ** rng.integers(-6, 3, (131, 1)))
    weights = weights.to(torch.bfloat16)
    tensors["weights.rows"] = weights
    add("weights.fp8_block128", *block128(weights, block_rows=128))

    default = pathlib.Path(__file__).with_name("quantize.safetensors")
    save_file(tensors, sys.argv[1] if len(sys.argv) > 1 else str(default))


if __name__ == "__main__":
    main()
