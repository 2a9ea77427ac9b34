"""Tiny random checkpoints for the tests with transformers, written by its own save_pretrained."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "golden"))
from make_checkpoints import DTYPES, FAMILIES, Sizes, make_config, save_fused  # noqa: E402

__all__ = ["DTYPES", "FAMILIES", "make_model", "save", "write_sparse"]


def make_model(
    family: str, dtype: str, experts: int, top_k: int, *, layers: int = 2, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """hidden 160, intermediate 96; `config` overrides fields of the configuration."""
    configuration = make_config(family, experts, top_k, Sizes(layers=layers))
    for name, value in config.items():
        setattr(configuration, name, value)
    torch.manual_seed(seed)
    return FAMILIES[family][1](configuration).to(DTYPES[dtype]).eval()


def save(model: PreTrainedModel, folder: Path, layout: str = "saved") -> Path:
    """layout: "saved" as save_pretrained writes it, "sharded", or "fused": a layer's experts together."""
    if layout == "fused":
        save_fused(model, folder)
    else:
        model.save_pretrained(folder, max_shard_size="200KB" if layout == "sharded" else "1GB")
    return folder


def write_sparse(config: Any, folder: Path, dtype: str = "BF16", size: int = 2) -> dict[str, int]:
    """A checkpoint in the fused layout whose tensors are holes of a sparse file (zeros). Bytes by tensor."""
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = FAMILIES[config.model_type][1](config)
    header, sizes, offset = {}, {}, 0
    for name, tensor in model.state_dict().items():
        sizes[name] = prod(tensor.shape) * size
        end = offset + sizes[name]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)
    return sizes
