#!/usr/bin/env python3
"""Writes tiny models with quantised weights, laid out as such models are released.

    make_quantised_models.py FOLDER [--only SUBSTRING]

Every model is FOLDER/<name>, with its codes and scales, and FOLDER/<name>-plain, the same model with the
exact values of its codes in F32 and no quantization_config, which transformers loads as any other. Both come
from torch and ml_dtypes alone: nothing here shares code with the servers or the client.

Sizes are no multiple of a block on purpose, but for MXFP4, which has whole blocks. The same arguments give
the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from make_zoo_models import FAMILIES, Tensors, make_model
from safetensors.torch import load_file, save_file

E4M3_MAX = 448.0
BLOCK = 128
MX_BLOCK = 32
SIZES = {
    "hidden_size": 160,
    "moe_intermediate_size": 136,
    "intermediate_size": 200,
    "moe_shared_expert_intermediate_size": 72,
}

# Of one matrix [out, in], or of one for each expert: the tensors to store, by what their names have after that
# of the matrix (after a slash: of its module), and the exact values, F32.
Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    """F32 [ceil(N / 128), ceil(K / 128)]: the least that brings a block's values into e4m3."""
    rows = [part.abs().split(BLOCK, dim=1) for part in weight.float().split(BLOCK)]
    return torch.tensor([[block.amax() for block in row] for row in rows]) / E4M3_MAX


def to_powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scales)))


def fp8_blocks(weight: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor) -> Quantised:
    n, k = weight.shape
    scale = scales.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": stored}, codes.float() * scale


def fp8_block128(weight: torch.Tensor) -> Quantised:
    """As DeepSeek-V3: weight_scale_inv multiplies, despite its name."""
    scales = block_scales(weight)
    return fp8_blocks(weight, scales, scales)


def fp8_block128_ue8m0(weight: torch.Tensor) -> Quantised:
    """As DeepSeek-V3.2: powers of two, stored in F32."""
    scales = to_powers_of_two(block_scales(weight))
    return fp8_blocks(weight, scales, scales)


def fp8_block128_e8m0(weight: torch.Tensor) -> Quantised:
    """The same, stored as exponents."""
    scales = to_powers_of_two(block_scales(weight))
    return fp8_blocks(weight, scales, scales.to(torch.float8_e8m0fnu))


def fp8_channel(weight: torch.Tensor) -> Quantised:
    """As compressed-tensors with a scale for a channel, in BF16."""
    scales = (weight.float().abs().amax(1, keepdim=True) / E4M3_MAX).bfloat16()
    codes = (weight.float() / scales.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scales}, codes.float() * scales.float()


def fp8_tensor(weight: torch.Tensor) -> Quantised:
    """A scale for the whole matrix, F32 [1]."""
    scale = weight.float().abs().amax().reshape(1) / E4M3_MAX
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale}, codes.float() * scale


def fp8_static(weight: torch.Tensor) -> Quantised:
    """As ModelOpt: scales without a shape, and one for the input, which is calibrated and not used here."""
    tensors, values = fp8_tensor(weight)
    tensors["_scale"] = tensors["_scale"].reshape(())
    return {**tensors, "/input_scale": torch.tensor(0.01)}, values


def mxfp4(weight: torch.Tensor) -> Quantised:
    """As gpt-oss. weight: [E, in, out], as its plain files have it; the codes are [E, out, in / 32, 16]."""
    by_row = weight.float().transpose(1, 2).contiguous().numpy()
    blocks = by_row.reshape(*by_row.shape[:2], -1, MX_BLOCK)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))).astype(np.int64) - 2  # 6 = 1.5 * 2^2 is the largest
    codes = (blocks / np.exp2(exponents)[..., None]).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    nibbles = codes.view(np.uint8) & 15
    scales = (exponents + 127).astype(np.uint8)
    values = codes.astype(np.float32) * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    packed = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    tensors = {"_blocks": torch.from_numpy(packed), "_scales": torch.from_numpy(scales)}
    return tensors, torch.from_numpy(values.reshape(by_row.shape)).transpose(1, 2).contiguous()


def linears(tensors: Tensors) -> Tensors:
    """The experts of Llama 4, stacked as [in, out], as the linear layers that quantisers make of them."""
    result = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("experts"):
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2, dim=1)))
            for part, weight in parts.items():
                result[f"{prefix}.{expert}.{part}.weight"] = weight.T.contiguous()
    return result


def stacked(tensors: Tensors) -> Tensors:
    """What `linears` was given."""
    result, found = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            found.setdefault(match[1], {}).setdefault(match[3], []).append(tensor.T)
        else:
            result[name] = tensor
    for prefix, kinds in found.items():
        gate, up, down = (torch.stack(kinds[kind]) for kind in ("gate_proj", "up_proj", "down_proj"))
        result[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), dim=2)
        result[f"{prefix}.down_proj"] = down.contiguous()
    return result


@dataclass(frozen=True)
class Model:
    """family: of make_zoo_models. config: the quantization_config, None where it is in a file of its own.
    names: of the matrices that are quantised, a regular expression to search for. edit: of what transformers
    saves, before, and its reverse. more: what is written beside."""

    family: str
    quantise: Callable[[torch.Tensor], Quantised]
    config: dict[str, Any] | None
    names: str
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)
    edit: Callable[[Tensors], Tensors] = lambda tensors: tensors
    reverse: Callable[[Tensors], Tensors] = lambda tensors: tensors
    more: Callable[[Tensors, Path], None] = lambda tensors, folder: None

    @property
    def shape(self) -> tuple[int, int]:
        return FAMILIES[self.family].shapes[0]


PROJECTIONS = r"_proj(_with_mqa)?\.weight$"
BLOCK128 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def compressed_tensors(strategy: str, ignore: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = {**weights, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def modelopt_file(tensors: Tensors, folder: Path) -> None:
    """What ModelOpt writes beside: its configuration, and scales of the cache."""
    for name in list(tensors):
        if name.endswith("k_proj.weight"):
            tensors[name.replace("k_proj.weight", "k_proj.k_scale")] = torch.tensor(1.0)
            tensors[name.replace("k_proj.weight", "v_proj.v_scale")] = torch.tensor(1.0)
    content = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": content}))


MODELS: dict[str, Model] = {
    "deepseek_v3-fp8": Model("deepseek_v3", fp8_block128, BLOCK128, PROJECTIONS),
    "deepseek_v32-fp8-ue8m0": Model(
        "deepseek_v32",
        fp8_block128_ue8m0,
        {**BLOCK128, "scale_fmt": "ue8m0"},
        PROJECTIONS + r"|indexer\.(wq_b|wk)\.weight$",
    ),
    "kimi_k2-fp8-e8m0": Model("kimi_k2", fp8_block128_e8m0, BLOCK128, PROJECTIONS),
    "minimax_m2-fp8": Model(
        "minimax_m2",
        fp8_block128,
        {**BLOCK128, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        PROJECTIONS + r"|\.w[123]\.weight$",
    ),
    "glm4_moe-channel": Model(
        "glm4_moe", fp8_channel, compressed_tensors("channel", ["lm_head", "re:.*mlp.gate$"]), PROJECTIONS
    ),
    "llama4-channel": Model(
        "llama4",
        fp8_channel,
        compressed_tensors("channel", ["re:.*self_attn", "re:.*router", "re:.*vision_model.*", "lm_head"]),
        r"feed_forward\..*_proj\.weight$",
        edit=linears,
        reverse=stacked,
    ),
    "dots1-tensor": Model(
        "dots1", fp8_tensor, compressed_tensors("tensor", []), PROJECTIONS + r"|^lm_head\.weight$"
    ),
    "phimoe-static": Model(
        "phimoe",
        fp8_static,
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        PROJECTIONS + r"|\.w[123]\.weight$",
    ),
    "nemotron_h-modelopt": Model(
        "nemotron_h",
        fp8_static,
        None,
        r"mixer\.(.*(up|down)|in|out)_proj\.weight$",
        more=modelopt_file,
    ),
    "gpt_oss-mxfp4": Model(
        "gpt_oss",
        mxfp4,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        r"experts\.(gate_up|down)_proj$",
        sizes={"hidden_size": 64, "intermediate_size": 96},
    ),
}


def save_quantised(name: str, folder: Path, seed: int = 0) -> Any:
    """Writes the model to `folder`, and the plain one to folder-plain; returns the latter, as transformers
    loads it, in F32 and eval mode."""
    known = MODELS[name]
    family = FAMILIES[known.family]
    model = make_model(known.family, "bf16", *known.shape, seed, **known.sizes)
    plain_folder = folder.with_name(folder.name + "-plain")
    model.save_pretrained(plain_folder)
    tensors = known.edit(load_file(plain_folder / "model.safetensors"))
    quantised, plain = dict(tensors), dict(tensors)
    for tensor_name in filter(re.compile(known.names).search, tensors):
        stored, plain[tensor_name] = known.quantise(quantised.pop(tensor_name))
        for suffix, tensor in stored.items():
            module = tensor_name.rpartition(".")[0]
            full = module + "." + suffix[1:] if suffix.startswith("/") else tensor_name + suffix
            quantised[full] = tensor
    assert len(quantised) > len(plain), f"{name}: nothing was quantised"
    save_file(known.reverse(plain), plain_folder / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((plain_folder / "config.json").read_text())
    if family.model_type:
        config["model_type"] = family.model_type
    family.released(config, quantised)
    if known.config is not None:
        config["quantization_config"] = known.config
    folder.mkdir(parents=True)
    known.more(quantised, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(quantised, folder / "model.safetensors", metadata={"format": "pt"})

    reference = type(model).from_pretrained(plain_folder, dtype=torch.float32, experts_implementation="eager")
    return reference.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="write the models with this in their name")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for seed, name in enumerate(MODELS):
        if arguments.only in name:
            save_quantised(name, arguments.folder / name, seed)


if __name__ == "__main__":
    main()
