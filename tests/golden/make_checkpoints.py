#!/usr/bin/env python3
"""Writes tiny random MoE checkpoints with transformers' own classes and save_pretrained.

    make_checkpoints.py FOLDER [--only SUBSTRING]
    make_checkpoints.py --committed    the even smaller ones in tests/golden/checkpoints

Every checkpoint is FOLDER/<family>-<dtype>-e<experts>k<top_k>-<layout>:

    saved    as save_pretrained writes it: one matrix per tensor and expert
    fused    the module's own names: all experts of a layer in one gate_up_proj and one down_proj
    sharded  as saved, cut into shards with an index (one case per family)

The committed ones have only the first two.

The sizes are uneven on purpose: the committed ones are no multiple of a vector, none is one of 64. FOLDER/cases.json
lists what was written. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

FAMILIES: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
COMMITTED = Path(__file__).resolve().parent / "checkpoints"
SHAPES = [(5, 1), (5, 3), (5, 5), (12, 3), (12, 12)]  # experts, top_k
SHARDED_SHAPE = (12, 3)  # two-digit expert ids, so that an order by name is not one by number


@dataclass(frozen=True)
class Sizes:
    hidden: int = 160
    intermediate: int = 96
    layers: int = 2
    vocabulary: int = 64


def make_config(family: str, experts: int, top_k: int, sizes: Sizes) -> Any:
    """The configuration of a case; normalisation alternates, so that both settings are covered."""
    config_class, _ = FAMILIES[family]
    common = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": top_k,
        # Large enough that the logits of rows of unit variance spread over a few units.
        "initializer_range": 0.1,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    normalised = top_k != 3 if family == "olmoe" else top_k == 3
    if family == "mixtral":
        return config_class(**common, intermediate_size=sizes.intermediate, num_local_experts=experts)
    if family == "qwen3_moe":
        return config_class(
            **common,
            intermediate_size=2 * sizes.intermediate,
            moe_intermediate_size=sizes.intermediate,
            num_experts=experts,
            norm_topk_prob=normalised,
            head_dim=sizes.hidden // 4,
        )
    return config_class(
        **common, intermediate_size=sizes.intermediate, num_experts=experts, norm_topk_prob=normalised
    )


def save_fused(model: Any, folder: Path) -> None:
    """Saves the parameters under the names they have in the module."""
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors), sorted(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--committed", action="store_true")
    parser.add_argument("--only", default="", help="write the checkpoints with this in their name")
    arguments = parser.parse_args()
    if arguments.committed == (arguments.folder is not None):
        parser.error("either a folder or --committed")

    folder_of_all, sizes = arguments.folder, Sizes()
    wanted = [(f, d, s) for f in FAMILIES for d in DTYPES for s in SHAPES]
    if arguments.committed:
        folder_of_all, sizes = COMMITTED, Sizes(hidden=12, intermediate=10, layers=1, vocabulary=8)
        wanted = [(f, "bf16", (11, 2)) for f in FAMILIES]
        shutil.rmtree(COMMITTED, ignore_errors=True)

    cases = []
    for seed, (family, dtype, (experts, top_k)) in enumerate(wanted):
        layouts = ["saved", "fused"]
        if (experts, top_k) == SHARDED_SHAPE and dtype == "bf16":
            layouts.append("sharded")
        stem = f"{family}-{dtype}-e{experts}k{top_k}"
        layouts = [layout for layout in layouts if arguments.only in f"{stem}-{layout}"]
        if not layouts:
            continue
        torch.manual_seed(seed)
        model = FAMILIES[family][1](make_config(family, experts, top_k, sizes)).to(DTYPES[dtype])
        for layout in layouts:
            folder = folder_of_all / f"{stem}-{layout}"
            if layout == "fused":
                save_fused(model, folder)
            else:
                model.save_pretrained(
                    folder, max_shard_size="200KB" if layout == "sharded" else "1GB"
                )
            cases.append(
                {
                    "name": folder.name,
                    "family": family,
                    "dtype": dtype,
                    "num_experts": experts,
                    "top_k": top_k,
                    "layout": layout,
                }
            )
    (folder_of_all / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
