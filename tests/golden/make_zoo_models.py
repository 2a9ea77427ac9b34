#!/usr/bin/env python3
"""Writes tiny random models of every family, in the layout that is released and in transformers 5's.

    make_zoo_models.py FOLDER [--only SUBSTRING]

Every model is FOLDER/<family>-<dtype>-e<experts>k<top_k>-<layout>:

    released  names, shapes and dtypes as in the files that models are published in: what transformers
              itself writes where that is the same, else renamed
    fused     the names that transformers 5 has in memory

Sizes are odd on purpose, biases and norms random. FOLDER/cases.json lists what was written; the same
arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
HIDDEN, INTERMEDIATE, SHARED, DENSE, VOCABULARY = 36, 21, 15, 26, 64
SHAPES = ((11, 3), (11, 1), (5, 5))  # experts, top_k; two-digit ids, to be sorted by number

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEADS = {"head_dim": 8}
LATENT_ATTENTION = {  # its heads have no groups
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
ONE_DENSE_LAYER = {"intermediate_size": DENSE, "first_k_dense_replace": 1, "num_hidden_layers": 3}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """model_class: of transformers, whose config_class goes with it. fields: of its configuration, from
    experts and top_k. fp32: tensors that released bf16 files have in F32. released: edits what transformers
    saves, configuration and tensors, into what is published."""

    model_class: str
    fields: Callable[[int, int], dict[str, Any]]
    shapes: tuple[tuple[int, int], ...] = SHAPES
    fp32: str = "e_score_correction_bias|expert_bias"
    released: Callable[[dict[str, Any], Tensors], None] = field(default=lambda config, tensors: None)
    model_type: str = ""  # of the released configuration, where transformers has another one


def add(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: config.update(values)


def with_next_token_layer(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    """Adds the layer that predicts one token more: after the last, of the same shapes, and not served."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config.update(values, num_nextn_predict_layers=1)
        last = config["num_hidden_layers"] - 1
        for name, tensor in list(tensors.items()):
            if name.startswith(prefix := f"model.layers.{last}."):
                changed = (tensor.float() + 1).to(tensor.dtype)
                tensors[f"model.layers.{last + 1}.{name.removeprefix(prefix)}"] = changed

    return edit


def inside(model_type: str, prefix: str) -> Callable[[dict[str, Any], Tensors], None]:
    """A language model inside a multimodal one."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        text = dict(config)
        config.clear()
        config.update(model_type=model_type, text_config=text, dtype=text.pop("dtype"))
        outer = prefix.removesuffix("model.") if prefix.startswith("language_model.") else ""
        for name in list(tensors):
            inner = name.replace("model.", prefix, 1) if name.startswith("model.") else outer + name
            tensors[inner] = tensors.pop(name)
        tensors["vision_model.norm.weight"] = torch.ones(3)

    return edit


def per_layer(config: dict[str, Any], tensors: Tensors) -> None:
    """Hunyuan-A13B says some numbers once per layer."""
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    config.update(
        moe_topk=[config["moe_topk"]] * layers,
        moe_intermediate_size=[width] * layers,
        num_shared_expert=[1] * layers,
        use_mixed_mlp_moe=True,
        norm_topk_prob=True,
        moe_drop_tokens=False,
        moe_layer_num_skipped=0,
    )


def without_weights_of_identity_experts(config: dict[str, Any], tensors: Tensors) -> None:
    """transformers keeps gate and up matrices for experts that have none."""
    for name in list(tensors):
        if match := re.search(r"mlp\.experts\.(\d+)\.", name):
            if int(match[1]) >= config["n_routed_experts"]:
                del tensors[name]
    config.update(zero_expert_type="identity")


def deepseek(experts: int, top_k: int, **more: Any) -> dict[str, Any]:
    return {
        **COMMON,
        **ONE_DENSE_LAYER,
        "moe_intermediate_size": INTERMEDIATE,
        "n_routed_experts": experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": top_k,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        **more,
    }


def deepseek_v2(experts: int, top_k: int) -> dict[str, Any]:
    limited = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    method = limited if experts % 4 == 0 else {"topk_method": "greedy"}
    return deepseek(experts, top_k, **LATENT_ATTENTION, **method, norm_topk_prob=False)


def grouped(experts: int, top_k: int) -> dict[str, Any]:
    groups = {"n_group": 4, "topk_group": 2} if experts % 4 == 0 else {}
    return deepseek(experts, top_k, **LATENT_ATTENTION, **groups)


def qwen(experts: int, top_k: int, **more: Any) -> dict[str, Any]:
    return {
        **COMMON,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "intermediate_size": DENSE,
        "moe_intermediate_size": INTERMEDIATE,
        "shared_expert_intermediate_size": SHARED,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        **more,
    }


def mixtral_like(experts: int, top_k: int, **more: Any) -> dict[str, Any]:
    return {
        **COMMON,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        **more,
    }


def llama4(experts: int, top_k: int) -> dict[str, Any]:
    fields = mixtral_like(experts, top_k, **HEADS, intermediate_size_mlp=DENSE)
    return {**fields, "interleave_moe_layer_step": 2, "num_hidden_layers": 4}


def gemma4(experts: int, top_k: int) -> dict[str, Any]:
    return {
        **COMMON,
        **HEADS,
        "global_head_dim": 8,
        "intermediate_size": DENSE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": experts,
        "top_k_experts": top_k,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    }


def qwen3_5(experts: int, top_k: int) -> dict[str, Any]:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return qwen(experts, top_k, **HEADS, **heads, layer_types=kinds)


def qwen3_5_names(config: dict[str, Any], tensors: Tensors) -> None:
    """Stacked experts, as transformers does not save them, and a part that predicts one token more."""
    stacks: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name):
            stacks.setdefault(match[1], {}).setdefault(match[2], []).append(tensors.pop(name))
    for prefix, parts in stacks.items():
        gate, up, down = (torch.stack(parts[part]) for part in ("gate_proj", "up_proj", "down_proj"))
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{prefix}.down_proj"] = down
    inside("qwen3_5_moe", "model.language_model.")(config, tensors)
    tensors["mtp.fc.weight"] = torch.ones(2 * HIDDEN, HIDDEN)


def qwen3_vl(experts: int, top_k: int) -> dict[str, Any]:
    """With a vision tower, since transformers has no class for its language model alone."""
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": HIDDEN}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    sections = {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 1e4}
    text = {**qwen(experts, top_k, **HEADS), "rope_parameters": sections}
    return {"text_config": text, "vision_config": vision}


def transposed(config: dict[str, Any], tensors: Tensors) -> None:
    """Stacked experts as [in, out], which transformers reads but does not write."""
    for name, tensor in list(tensors.items()):
        if ".mlp.experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()


def exaone_names(config: dict[str, Any], tensors: Tensors) -> None:
    for name in list(tensors):
        if name.endswith("mlp.gate.e_score_correction_bias"):
            tensors[name.replace("mlp.gate.", "mlp.")] = tensors.pop(name)


def laguna_names(config: dict[str, Any], tensors: Tensors) -> None:
    for name in list(tensors):
        if ".mlp.shared_experts." in name or name.endswith("mlp.gate.e_score_correction_bias"):
            new = name.replace("shared_experts", "shared_expert").replace("mlp.gate.e_", "mlp.experts.e_")
            tensors[new] = tensors.pop(name)


def mimo_names(config: dict[str, Any], tensors: Tensors) -> None:
    """The list of the layers that have experts goes by numbers."""
    kinds = config.pop("mlp_layer_types")
    config.update(moe_layer_freq=[int(kind == "sparse") for kind in kinds])
    config.update(scoring_func="sigmoid", topk_method="noaux_tc")
    for name in list(tensors):
        if name.endswith("self_attn.sinks"):
            tensors[name.replace("sinks", "attention_sink_bias")] = tensors.pop(name)


GROUPED_SHAPES = ((12, 3), (11, 1), (5, 5))
INDEXER = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}  # of sparse attention
V3_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

FAMILIES: dict[str, Family] = {
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qwen),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        deepseek_v2,
        GROUPED_SHAPES,
        released=add(scoring_func="softmax", moe_layer_freq=1, aux_loss_alpha=0.001, seq_aux=True),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", grouped, GROUPED_SHAPES, released=with_next_token_layer(**V3_KEYS)
    ),
    "kimi_k2": Family(
        "DeepseekV3ForCausalLM",
        lambda e, k: deepseek(e, k, **LATENT_ATTENTION, routed_scaling_factor=2.827),
        released=add(**V3_KEYS, num_nextn_predict_layers=0),
        model_type="kimi_k2",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", lambda e, k: deepseek(e, k, **HEADS), released=with_next_token_layer()
    ),
    "dots1": Family("Dots1ForCausalLM", lambda e, k: deepseek(e, k, **HEADS), released=add(**V3_KEYS)),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        # The limit is low enough to cut.
        lambda e, k: mixtral_like(e, k, **HEADS, swiglu_limit=0.7),
        released=lambda config, tensors: config.update(experts_per_token=config["num_experts_per_tok"]),
    ),
    "llama4_text": Family("Llama4ForCausalLM", llama4),
    "llama4": Family("Llama4ForCausalLM", llama4, released=inside("llama4", "language_model.model.")),
    "granitemoe": Family("GraniteMoeForCausalLM", mixtral_like),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM", lambda e, k: mixtral_like(e, k, shared_intermediate_size=SHARED)
    ),
    "jamba": Family(
        "JambaForCausalLM",
        lambda e, k: {
            **qwen(e, k),
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "dbrx": Family(
        "DbrxForCausalLM",
        lambda e, k: {
            **{key: COMMON[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
            "d_model": HIDDEN,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 128,
            "initializer_range": 0.1,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {
                "hidden_size": HIDDEN,
                "ffn_hidden_size": INTERMEDIATE,
                "moe_num_experts": e,
                "moe_top_k": k,
            },
        },
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        lambda e, k: {
            **COMMON,
            "num_hidden_layers": 3,
            "intermediate_size": DENSE,
            "moe_intermediate_size": INTERMEDIATE,
            "moe_num_experts": e,
            "moe_k": k,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        fp32=r"e_score_correction_bias|mlp\.gate\.weight",
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        lambda e, k: {**COMMON, **HEADS, "intermediate_size": INTERMEDIATE, "num_experts": e, "moe_topk": k},
        fp32=r"mlp\.gate\.wg\.weight",
        released=per_layer,
    ),
    "minimax": Family(
        "MiniMaxForCausalLM",
        lambda e, k: mixtral_like(
            e, k, **HEADS, layer_types=["linear_attention", "full_attention"], block_size=16
        ),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        lambda e, k: mixtral_like(e, k, **HEADS, rotary_dim=8),
        released=add(scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        lambda e, k: qwen(
            e,
            k,
            **HEADS,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        # The noise is large enough for several experts to survive.
        lambda e, k: mixtral_like(e, k, router_jitter_noise=0.2),
        ((11, 2), (2, 2)),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        lambda e, k: {
            **deepseek(e, k, **HEADS),
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"],
            "num_hidden_layers": 5,
            "moe_shared_expert_intermediate_size": SHARED,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
        },
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        lambda e, k: {
            **COMMON,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "intermediate_size": DENSE,
            "moe_intermediate_size": INTERMEDIATE,
            "num_experts": e,
            "num_experts_per_tok": k,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma4_text": Family("Gemma4ForCausalLM", gemma4),
    "gemma4": Family("Gemma4ForCausalLM", gemma4, released=inside("gemma4", "model.language_model.")),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        lambda e, k: {
            **COMMON,
            **ONE_DENSE_LAYER,
            **HEADS,
            "moe_intermediate_size": INTERMEDIATE,
            "num_experts": e,
            "num_experts_per_tok": k,
            "num_shared_experts": 2,
            "router_scaling_factor": 2.5,
        },
        fp32="expert_bias|router.gate.weight|mlp.gate.weight|e_score_correction_bias",
    ),
    "mistral4": Family("Mistral4ForCausalLM", grouped, GROUPED_SHAPES),
    "mistral3": Family(
        "Mistral4ForCausalLM",
        grouped,
        GROUPED_SHAPES,
        released=inside("mistral3", "model.language_model."),
    ),
    "longcat_flash": Family(
        "LongcatFlashForCausalLM",
        lambda e, k: {
            **{key: value for key, value in COMMON.items() if key != "num_hidden_layers"},
            **LATENT_ATTENTION,
            "num_layers": 2,
            "head_dim": 6,
            "ffn_hidden_size": DENSE,
            "expert_ffn_hidden_size": INTERMEDIATE,
            "n_routed_experts": e,
            "zero_expert_num": 4,
            "moe_topk": k,
            "routed_scaling_factor": 6.0,
        },
        ((11, 3), (11, 2), (5, 9)),  # transformers cannot choose one
        released=without_weights_of_identity_experts,
    ),
    "mixtral": Family("MixtralForCausalLM", mixtral_like),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", lambda e, k: qwen(e, k, **HEADS, norm_topk_prob=k == 3)),
    "olmoe": Family(
        "OlmoeForCausalLM",
        lambda e, k: {**qwen(e, k, norm_topk_prob=k == 1), "intermediate_size": INTERMEDIATE},
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        lambda e, k: {**qwen(e, k, norm_topk_prob=k == 1), "intermediate_size": INTERMEDIATE},
    ),
    "mellum": Family(
        "MellumForCausalLM",
        lambda e, k: {
            **qwen(e, k, **HEADS, norm_topk_prob=k != 3),
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", qwen3_5),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", qwen3_5, released=qwen3_5_names),
    "qwen3_vl_moe": Family("Qwen3VLMoeForConditionalGeneration", qwen3_vl, released=transposed),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        lambda e, k: mixtral_like(
            e,
            k,
            shared_intermediate_size=SHARED,
            layer_types=["linear_attention", "full_attention"],
            mamba_n_heads=4,
            mamba_d_head=18,
            mamba_d_state=8,
            mamba_chunk_size=16,
        ),
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        lambda e, k: deepseek(e, k, **LATENT_ATTENTION, routed_scaling_factor=1.8),
        released=with_next_token_layer(),
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", lambda e, k: deepseek(e, k, **LATENT_ATTENTION, **INDEXER)
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        lambda e, k: {**grouped(e, k), **INDEXER},
        GROUPED_SHAPES,
        released=with_next_token_layer(**V3_KEYS),
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM", lambda e, k: deepseek(e, k, **HEADS, first_k_dense_replace=0)
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        lambda e, k: {
            **deepseek(e, k, **HEADS),
            "num_experts": e,
            "num_shared_experts": 2,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
        },
        released=exaone_names,
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        lambda e, k: {
            **deepseek(e, k, **HEADS),
            "n_shared_experts": None,
            "v_head_dim": 6,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        released=mimo_names,
    ),
    "afmoe": Family(
        "AfmoeForCausalLM",
        lambda e, k: {
            **deepseek(e, k, **HEADS),
            "num_experts": e,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 2.5,
            "sliding_window": 16,
            "global_attn_every_n_layers": 2,
        },
        released=add(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    ),
    "laguna": Family(
        "LagunaForCausalLM",
        lambda e, k: {
            **qwen(e, k, **HEADS),
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 1.5 if k == 3 else 0.0,
        },
        released=laguna_names,
    ),
    "cohere2_moe": Family(
        "Cohere2MoeForCausalLM",
        lambda e, k: {
            **qwen(e, k, **HEADS),
            "intermediate_size": INTERMEDIATE,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "average" if k == 3 else "sum",
            "expert_selection_fn": "sigmoid" if k == 5 else "softmax",
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
}


def make_model(family: str, dtype: str, experts: int, top_k: int, seed: int = 0, **sizes: int) -> Any:
    """In eval mode, its experts computed one after the other. sizes: other values for fields that it has."""
    known = FAMILIES[family]
    model_class = getattr(transformers, known.model_class)
    fields = known.fields(experts, top_k)
    fields.update((name, size) for name, size in sizes.items() if name in fields)
    config = model_class.config_class(**fields)
    config._experts_implementation = "eager"
    config.dtype = DTYPES[dtype]
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias") or name.endswith("router.per_expert_scale"):
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif "norm" in name or name.endswith("router.scale"):
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif tensor.dim() > 1 and not tensor.any():  # routers that start with zeros
                tensor.normal_(std=0.1)
        model.to(DTYPES[dtype])
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if re.search(known.fp32, name):
                tensor.data = tensor.data.float()
    return model.eval()


def save(model: Any, folder: Path, family: str, layout: str) -> Path:
    """Writes config.json and model.safetensors of a model of make_model in that layout."""
    known = FAMILIES[family]
    if layout == "fused":
        folder.mkdir(parents=True)
        model.config.save_pretrained(folder)
        tied = set(model.all_tied_weights_keys)
        tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n not in tied}
    else:
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if layout == "released":
        if known.model_type:
            config["model_type"] = known.model_type
        known.released(config, tensors)
        path.write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="write the models with this in their name")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    cases = []
    wanted = [(f, d, s) for f in FAMILIES for d in DTYPES for s in FAMILIES[f].shapes]
    for seed, (family, dtype, (experts, top_k)) in enumerate(wanted):
        stem = f"{family}-{dtype}-e{experts}k{top_k}"
        layouts = [layout for layout in ("released", "fused") if arguments.only in f"{stem}-{layout}"]
        if not layouts:
            continue
        model = make_model(family, dtype, experts, top_k, seed)
        for layout in layouts:
            save(model, arguments.folder / f"{stem}-{layout}", family, layout)
            cases.append(
                {
                    "name": f"{stem}-{layout}",
                    "family": family,
                    "dtype": dtype,
                    "num_experts": experts,
                    "top_k": top_k,
                    "layout": layout,
                }
            )
    (arguments.folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
