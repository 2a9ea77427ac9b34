"""Quantised weights of checkpoints, outside the experts: which are read, and what their values are.

The same formats as the servers read (common/model/quantization.h), but for MXFP4, in which only experts are
released.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors import safe_open

from .error import Error

CODES = torch.float8_e4m3fn  # the dtype of fp8 weights
_BLOCK = 128
_SUPPORTED = (
    "supported are fp8 (e4m3, blocks of 128 x 128 or one scale for a matrix), compressed-tensors "
    "(float-quantized), modelopt (FP8) and mxfp4"
)
_PLAIN = ("F64", "F32", "BF16", "F16")


class Scheme(Enum):
    """How fp8 weights are scaled."""

    BLOCKS = "a scale for each block of 128 x 128"
    ROWS = "a scale for each row, or one for the matrix"
    BY_NAME = "blocks where scales are called ..._scale_inv, else rows"
    NONE = "no weights outside the experts are quantised"


def read_scheme(folder: Path) -> Scheme | None:
    """What the configuration of a checkpoint says; None where nothing is quantised.

    Error: UNIMPLEMENTED for methods that are not read, by name.
    """
    fields = _fields(folder / "config.json")
    text = fields.get("text_config")
    config = fields.get("quantization_config") or (text or {}).get("quantization_config")
    if config:
        return _scheme(config)
    config = _fields(folder / "hf_quant_config.json").get("quantization") or {}
    return _scheme({**config, "quant_method": "modelopt"}) if config.get("quant_algo") else None


def is_scale(name: str) -> bool:
    """True for tensors that quantisers add to a module. Scales of activations, which are not quantised here,
    and of the cache are among them."""
    return name.endswith(("_scale", "_scale_inv", ".scale"))


@dataclass(frozen=True)
class Scales:
    """Of one matrix: values F32 [ceil(N / rows), ceil(K / columns)], one for each block of rows x columns."""

    values: torch.Tensor
    rows: int
    columns: int

    def dequantise(self, codes: torch.Tensor, first: int) -> torch.Tensor:
        """Rows of the matrix from row `first` on, F32."""
        rows = torch.arange(first, first + codes.shape[0]) // self.rows
        columns = torch.arange(codes.shape[1]) // self.columns
        return codes.float() * self.values[rows][:, columns]


def read_scales(names: Iterable[str], files: dict[str, Path], scheme: Scheme | None) -> dict[str, Scales]:
    """Those of the tensors, among these, that are quantised. files: where each tensor of the checkpoint is.

    Error: INVALID_ARGUMENT, naming the tensor, where one is neither plain nor a matrix with good scales.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    result = {}
    for file, inside in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in inside:
                stored = tensors.get_slice(name)
                if (dtype := stored.get_dtype()) == "F8_E4M3":
                    result[name] = _scales_of(name, stored.get_shape(), files, scheme)
                elif dtype not in _PLAIN:
                    raise _invalid(f"{file}: {name}: expected F32, BF16, F16 or F8_E4M3, given {dtype}")
    return result


def _scales_of(name: str, shape: list[int], files: dict[str, Path], scheme: Scheme | None) -> Scales:
    where = f"{files[name]}: {name}"
    if scheme in (None, Scheme.NONE):
        raise _invalid(f"{where} is F8_E4M3, but config.json has no quantization_config of fp8")
    if len(shape) != 2:
        raise _invalid(f"{where} is F8_E4M3: expected a matrix, given shape {shape}")
    names = [name + "_scale_inv", name + "_scale"]
    if name.endswith(".weight"):
        names.append(name.removesuffix("weight") + "scale")
    found = next((scale for scale in names if scale in files), None)
    if found is None:
        raise _invalid(f"{where} is F8_E4M3 and has no scales: {' or '.join(names)} is missing")
    with safe_open(files[found], framework="pt") as tensors:
        values = tensors.get_tensor(found).float()
    n, k = shape
    if scheme is Scheme.BLOCKS or (scheme is Scheme.BY_NAME and found == names[0]):
        rows, columns = _BLOCK, _BLOCK
        expected = [[-(-n // _BLOCK), -(-k // _BLOCK)]]
    else:
        rows, columns = n if values.numel() == 1 else 1, k
        expected = [[n, 1], [n], [1], [], [1, 1]]
    if list(values.shape) not in expected:
        raise _invalid(
            f"{files[found]}: {found}: expected shape {' or '.join(map(str, expected))}, "
            f"given {list(values.shape)}"
        )
    if not bool(((values > 0) & values.isfinite()).all()):
        raise _invalid(f"{files[found]}: {found}: expected scales that are positive and finite")
    return Scales(values.reshape(-1, 1) if columns == k else values, rows, columns)


def _scheme(config: dict[str, Any]) -> Scheme:
    method = config.get("quant_method", "(none)")
    if method == "mxfp4":
        return Scheme.NONE
    if method == "modelopt":
        if config.get("quant_algo") != "FP8":
            raise _unsupported(f"quant_method modelopt with quant_algo {config.get('quant_algo')!r}")
        return Scheme.ROWS
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method != "fp8":
        raise _unsupported(f"quant_method {method!r}")
    if (fmt := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(f"fmt {fmt!r}")
    block = config.get("weight_block_size")
    if block is None:
        return Scheme.BY_NAME
    if list(block) != [_BLOCK, _BLOCK]:
        raise _unsupported(f"weight_block_size {block}")
    return Scheme.BLOCKS


def _compressed_tensors(config: dict[str, Any]) -> Scheme:
    if (given := config.get("format")) != "float-quantized":
        raise _unsupported(f"quant_method compressed-tensors with format {given!r}")
    found = set()
    for name, group in (config.get("config_groups") or {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _invalid(f"quantization_config: config_groups: {name}: expected an object weights")
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise _unsupported(f"config_groups: {name}: weights {weights}")
        strategy = weights.get("strategy") or "tensor"
        if strategy == "block" and weights.get("block_structure") == [_BLOCK, _BLOCK]:
            found.add(Scheme.BLOCKS)
        elif strategy in ("channel", "tensor"):
            found.add(Scheme.ROWS)
        else:
            raise _unsupported(f"config_groups: {name}: strategy {strategy!r}")
    if len(found) != 1:
        given = " and ".join(sorted(scheme.value for scheme in found)) or "none"
        raise _unsupported(f"config_groups of more or fewer than one kind of scales ({given})")
    return found.pop()


def _fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return fields


def _unsupported(what: str) -> Error:
    return Error(
        grpc.StatusCode.UNIMPLEMENTED, f"quantization_config: {what} is not supported; {_SUPPORTED}"
    )


def _invalid(message: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, message)
