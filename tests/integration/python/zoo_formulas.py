"""The MoE blocks of all families in float64, from the tensors of released files.

Written from the published formulas, with the names of the published files: shares no code with transformers,
nor with the servers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "golden"))
from make_gating_golden import route_and_gap  # noqa: E402

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]  # float64


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def swiglu(g: np.ndarray, u: np.ndarray, config: Config) -> np.ndarray:
    return g * sigmoid(g) * u


def gpt_oss_glu(g: np.ndarray, u: np.ndarray, config: Config) -> np.ndarray:
    limit, alpha = config["swiglu_limit"], config.get("swiglu_alpha", 1.702)
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return g * sigmoid(alpha * g) * (u + 1)


def geglu_tanh(g: np.ndarray, u: np.ndarray, config: Config) -> np.ndarray:
    return g / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u


def relu2(g: np.ndarray, u: np.ndarray, config: Config) -> np.ndarray:
    """Not gated: g is the up projection, and u is it again."""
    return np.maximum(g, 0) ** 2


@dataclass(frozen=True)
class Mlp:
    """x -> down(activation(gate(x), up(x))) with matrices [out, in]."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray | float = 0.0
    up_bias: np.ndarray | float = 0.0
    down_bias: np.ndarray | float = 0.0

    def __call__(self, x: np.ndarray, activation: Callable, config: Config) -> np.ndarray:
        g, u = x @ self.gate.T + self.gate_bias, x @ self.up.T + self.up_bias
        return activation(g, u, config) @ self.down.T + self.down_bias


def plain(*names: str) -> Callable[[Tensors, str], Mlp]:
    return lambda tensors, prefix: Mlp(*(tensors[f"{prefix}{name}.weight"] for name in names))


GATE_UP_DOWN = plain("gate_proj", "up_proj", "down_proj")
UP_DOWN = plain("up_proj", "up_proj", "down_proj")
W1_W3_W2 = plain("w1", "w3", "w2")


def one_by_one(mlp: Callable[[Tensors, str], Mlp]) -> Callable[[Tensors, str, int, Config], Mlp]:
    return lambda tensors, block, expert, config: mlp(tensors, f"{block}experts.{expert}.")


def gpt_oss_expert(tensors: Tensors, block: str, expert: int, config: Config) -> Mlp:
    """Stacked as [in, out], gate and up columns taking turns."""
    joined, bias = (tensors[f"{block}experts.gate_up_proj{end}"][expert] for end in ("", "_bias"))
    down, down_bias = (tensors[f"{block}experts.down_proj{end}"][expert] for end in ("", "_bias"))
    return Mlp(joined[:, ::2].T, joined[:, 1::2].T, down.T, bias[::2], bias[1::2], down_bias)


def llama4_expert(tensors: Tensors, block: str, expert: int, config: Config) -> Mlp:
    """Stacked as [in, out], gate columns first."""
    gate, up = np.split(tensors[f"{block}experts.gate_up_proj"][expert], 2, axis=1)
    return Mlp(gate.T, up.T, tensors[f"{block}experts.down_proj"][expert].T)


def halves(gate_up: np.ndarray, down: np.ndarray) -> Mlp:
    return Mlp(*np.split(gate_up, 2), down)


def granite_expert(tensors: Tensors, block: str, expert: int, config: Config) -> Mlp:
    block += "block_sparse_moe."
    return halves(
        tensors[f"{block}input_linear.weight"][expert], tensors[f"{block}output_linear.weight"][expert]
    )


def fused_expert(tensors: Tensors, block: str, expert: int, config: Config) -> Mlp:
    return halves(
        tensors[f"{block}experts.gate_up_proj"][expert], tensors[f"{block}experts.down_proj"][expert]
    )


def dbrx_expert(tensors: Tensors, block: str, expert: int, config: Config) -> Mlp:
    """All experts of a layer in one matrix; the down projection is stored as the others are."""
    width = config["ffn_config"]["ffn_hidden_size"]
    w1, v1, w2 = (
        tensors[f"{block}experts.mlp.{name}"][expert * width : (expert + 1) * width]
        for name in ("w1", "v1", "w2")
    )
    return Mlp(w1, v1, w2.T)


def granite_shared(tensors: Tensors, block: str) -> Mlp:
    return halves(
        tensors[f"{block}shared_mlp.input_linear.weight"], tensors[f"{block}shared_mlp.output_linear.weight"]
    )


def under(name: str, mlp: Callable[[Tensors, str], Mlp]) -> Callable[[Tensors, str], Mlp]:
    return lambda tensors, block: mlp(tensors, f"{block}{name}.")


def rms_norm(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


@dataclass(frozen=True)
class Formula:
    """block: prefix of a layer's tensors. gate: fields of the router, from the configuration; top_k is the
    first of those keys that is there. The other names are of tensors under the prefix."""

    gate: Callable[[Config], dict[str, Any]] = lambda config: {}
    block: str = "model.layers.{}.mlp."
    router: str = "gate.weight"
    logits_bias: str = ""
    selection_bias: str = ""
    per_expert_scale: str = ""
    expert: Callable[[Tensors, str, int, Config], Mlp] = one_by_one(GATE_UP_DOWN)
    activation: Callable = swiglu
    shared: Callable[[Tensors, str], Mlp] | None = None
    shared_gate: str = ""
    dense: Callable[[Tensors, str], Mlp] | None = None
    averaged: Callable[[Config], bool] = lambda config: False
    router_norm: str = ""  # weights of the router's input norm
    expert_norm: str = ""  # and of the experts'
    top_k: tuple[str, ...] = field(default=("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"))


def normalised(config: Config) -> dict[str, Any]:
    return {"norm": "sum"}


def if_asked(config: Config) -> dict[str, Any]:
    return {"norm": "sum"} if config["norm_topk_prob"] else {}


def late_softmax(config: Config) -> dict[str, Any]:
    return {"order": "topk_then_score"}


def deepseek_v2(config: Config) -> dict[str, Any]:
    gate = {"scale": config["routed_scaling_factor"]}
    if config["topk_method"] == "group_limited_greedy":
        gate.update(group_score="max", mask_fill="zero")
        gate.update(num_groups=config["n_group"], topk_groups=config["topk_group"])
    return gate


def deepseek_v3(config: Config) -> dict[str, Any]:
    gate = {"score": "sigmoid", "scale": config["routed_scaling_factor"]}
    gate.update(group_score="top2_sum", num_groups=config["n_group"], topk_groups=config["topk_group"])
    return {**gate, "norm": "sum", "norm_epsilon": 1e-20} if config["norm_topk_prob"] else gate


def mistral4(config: Config) -> dict[str, Any]:
    return {**deepseek_v3(config), "score": "softmax", "mask_fill": "zero"}


def cohere2(config: Config) -> dict[str, Any]:
    if config["expert_selection_fn"] == "softmax":
        return late_softmax(config)
    return {"score": "sigmoid", **late_softmax(config), **if_asked(config)}


def constant(**gate: Any) -> Callable[[Config], dict[str, Any]]:
    return lambda config: gate


DEEPSEEK = {"shared": under("shared_experts", GATE_UP_DOWN), "dense": GATE_UP_DOWN}
CORRECTION = "e_score_correction_bias"
V3 = Formula(deepseek_v3, selection_bias=f"gate.{CORRECTION}", **DEEPSEEK)
SPARSE_MOE = {"block": "model.layers.{}.block_sparse_moe.", "expert": one_by_one(W1_W3_W2)}
GRANITE = {"block": "model.layers.{}.", "router": "block_sparse_moe.router.layer.weight"}


def llama4(prefix: str) -> Formula:
    return Formula(
        constant(score="sigmoid", order="topk_then_score", weigh_input=True),
        block=prefix + "layers.{}.feed_forward.",
        router="router.weight",
        expert=llama4_expert,
        shared=under("shared_expert", GATE_UP_DOWN),
        dense=GATE_UP_DOWN,
    )


def gemma4(prefix: str) -> Formula:
    return Formula(
        normalised,
        block=prefix + "layers.{}.",
        router="router.proj.weight",
        per_expert_scale="router.per_expert_scale",
        expert=fused_expert,
        activation=geglu_tanh,
        router_norm="router.scale",
        expert_norm="pre_feedforward_layernorm_2.weight",
    )


def qwen2(prefix: str) -> Formula:
    """A shared expert with a gate of its own."""
    return Formula(
        if_asked,
        block=prefix + "layers.{}.mlp.",
        shared=under("shared_expert", GATE_UP_DOWN),
        shared_gate="shared_expert_gate.weight",
        dense=GATE_UP_DOWN,
    )


def qwen3_5(prefix: str) -> Formula:
    return replace(qwen2(prefix), gate=normalised)


QWEN2 = qwen2("model.")
MISTRAL4 = Formula(mistral4, expert=fused_expert, **DEEPSEEK)
OLMOE = Formula(if_asked)
QWEN3 = Formula(if_asked, dense=GATE_UP_DOWN)

FORMULAS: dict[str, Formula] = {
    "afmoe": Formula(
        lambda config: {
            "score": "sigmoid",
            "norm": "sum",
            "norm_epsilon": 1e-20,
            "scale": config["route_scale"],
        },
        router="router.gate.weight",
        selection_bias="expert_bias",
        **DEEPSEEK,
    ),
    "deepseek_v32": V3,
    "exaone_moe": replace(V3, selection_bias=CORRECTION),
    "flex_olmo": OLMOE,
    "glm4_moe_lite": V3,
    "glm_moe_dsa": V3,
    "granitemoehybrid": Formula(late_softmax, expert=granite_expert, shared=granite_shared, **GRANITE),
    "laguna": Formula(
        lambda config: {
            "score": "sigmoid",
            "norm": "sum",
            "scale": config["moe_routed_scaling_factor"],
            "softcap": config["moe_router_logit_softcapping"],
        },
        selection_bias=f"experts.{CORRECTION}",
        shared=under("shared_expert", GATE_UP_DOWN),
        dense=GATE_UP_DOWN,
    ),
    "mellum": QWEN3,
    "mimo_v2_flash": replace(V3, shared=None),
    "mixtral": Formula(normalised, **SPARSE_MOE),
    "olmoe": OLMOE,
    "qwen3_5_moe": replace(qwen3_5("model.language_model."), expert=fused_expert),
    "qwen3_5_moe_text": qwen3_5("model."),
    "qwen3_moe": QWEN3,
    "qwen3_vl_moe": Formula(
        normalised, block="model.language_model.layers.{}.mlp.", expert=llama4_expert, dense=GATE_UP_DOWN
    ),
    "solar_open": replace(V3, dense=None),
    "cohere2_moe": Formula(
        cohere2, averaged=lambda config: config["shared_expert_combination_strategy"] == "average", **DEEPSEEK
    ),
    "dbrx": Formula(
        lambda config: {"norm": "p_norm", "norm_p": config["ffn_config"]["moe_normalize_expert_weights"]},
        block="transformer.blocks.{}.ffn.",
        router="router.layer.weight",
        expert=dbrx_expert,
    ),
    "deepseek_v2": Formula(deepseek_v2, **DEEPSEEK),
    "deepseek_v3": V3,
    "dots1": V3,
    "ernie4_5_moe": Formula(
        lambda config: {"norm": "sum_clamped", "norm_epsilon": config["moe_norm_min"]},
        selection_bias=f"moe_statics.{CORRECTION}",
        **DEEPSEEK,
    ),
    "gemma4": gemma4("model.language_model."),
    "gemma4_text": gemma4("model."),
    "glm4_moe": V3,
    "gpt_oss": Formula(
        late_softmax,
        router="router.weight",
        logits_bias="router.bias",
        expert=gpt_oss_expert,
        activation=gpt_oss_glu,
    ),
    "granitemoe": Formula(late_softmax, expert=granite_expert, **GRANITE),
    "granitemoeshared": Formula(late_softmax, expert=granite_expert, shared=granite_shared, **GRANITE),
    "hunyuan_v1_moe": Formula(normalised, router="gate.wg.weight", shared=under("shared_mlp", GATE_UP_DOWN)),
    "hy_v3": Formula(
        lambda config: {
            "score": "sigmoid",
            "norm": "sum",
            "norm_epsilon": 1e-20,
            "scale": config["router_scaling_factor"],
        },
        router="router.gate.weight",
        selection_bias="expert_bias",
        shared=under("shared_mlp", GATE_UP_DOWN),
        dense=GATE_UP_DOWN,
    ),
    "jamba": Formula(block="model.layers.{}.feed_forward.", router="router.weight", dense=GATE_UP_DOWN),
    "kimi_k2": V3,
    "lfm2_moe": Formula(
        lambda config: {
            "score": "sigmoid",
            "norm": "sum",
            "norm_epsilon": 1e-6,
            "scale": config["routed_scaling_factor"],
        },
        block="model.layers.{}.feed_forward.",
        selection_bias="expert_bias",
        expert=one_by_one(W1_W3_W2),
        dense=W1_W3_W2,
    ),
    "llama4": llama4("language_model.model."),
    "llama4_text": llama4("model."),
    "longcat_flash": Formula(
        lambda config: {
            "scale": config["routed_scaling_factor"],
            "identity_experts": config["zero_expert_num"],
        },
        router="router.classifier.weight",
        selection_bias=f"router.{CORRECTION}",
    ),
    "minimax": Formula(normalised, **SPARSE_MOE),
    "minimax_m2": Formula(constant(score="sigmoid", norm="sum"), selection_bias=CORRECTION, **SPARSE_MOE),
    "mistral3": replace(MISTRAL4, block="model.language_model.layers.{}.mlp."),
    "mistral4": MISTRAL4,
    "nemotron_h": Formula(
        deepseek_v3,
        block="backbone.layers.{}.mixer.",
        selection_bias=f"gate.{CORRECTION}",
        expert=one_by_one(UP_DOWN),
        activation=relu2,
        shared=under("shared_experts", UP_DOWN),
        dense=UP_DOWN,
    ),
    "phimoe": Formula(
        lambda config: {"score": "sparsemixer", "jitter": config["router_jitter_noise"]}, **SPARSE_MOE
    ),
    "qwen2_moe": QWEN2,
    "qwen3_next": QWEN2,
}


@dataclass(frozen=True)
class Result:
    output: np.ndarray  # [T, D]
    ids: np.ndarray  # [T, K]
    weights: np.ndarray  # [T, K]
    gaps: np.ndarray  # [T]: least difference between numbers that decide which experts are chosen


def dense_output(formula: Formula, config: Config, tensors: Tensors, layer: int, x: np.ndarray) -> np.ndarray:
    """Of a layer without experts. x: [T, D]."""
    assert formula.dense is not None
    return formula.dense(tensors, formula.block.format(layer))(x, formula.activation, config)


def block_output(formula: Formula, config: Config, tensors: Tensors, layer: int, x: np.ndarray) -> Result:
    """Of a layer's MoE block. config: of the language model; x: [T, D]."""
    block = formula.block.format(layer)

    def vector(name: str) -> np.ndarray:
        return tensors[block + name].reshape(-1) if name else np.empty(0)

    seen, router_seen = x, x
    if formula.router_norm:
        x_hat = rms_norm(x, config["rms_norm_eps"])
        seen = x_hat * vector(formula.expert_norm)
        router_seen = x_hat * vector(formula.router_norm) / math.sqrt(x.shape[1])
    logits = router_seen @ tensors[block + formula.router].T
    top_k = next((config[key] for key in formula.top_k if key in config), None)
    if top_k is None:
        top_k = config["ffn_config"]["moe_top_k"]
    gate = {**formula.gate(config), "top_k": top_k[0] if isinstance(top_k, list) else top_k}
    experts = logits.shape[1] - gate.get("identity_experts", 0)
    mlps = [formula.expert(tensors, block, expert, config) for expert in range(experts)]
    output = np.zeros_like(x)
    all_ids, all_weights, gaps = [], [], []
    for t, row in enumerate(logits):
        case = {
            "router": gate,
            "logits": row.tolist(),
            "logits_bias": vector(formula.logits_bias).tolist(),
            "selection_bias": vector(formula.selection_bias).tolist(),
            "per_expert_scale": vector(formula.per_expert_scale).tolist(),
        }
        ids, weights, gap = route_and_gap(case, ordered=False)
        for expert, weight in zip(ids, weights):
            if expert >= experts:
                output[t] += weight * seen[t]
            elif gate.get("weigh_input"):
                output[t] += mlps[expert](weight * seen[t], formula.activation, config)
            else:
                output[t] += weight * mlps[expert](seen[t], formula.activation, config)
        all_ids.append(ids)
        all_weights.append(weights)
        gaps.append(gap)
    if formula.shared is not None:
        shared = formula.shared(tensors, block)(seen, formula.activation, config)
        if formula.shared_gate:
            shared *= sigmoid(seen @ tensors[block + formula.shared_gate].T)
        output += shared
        if formula.averaged(config):
            output /= 2
    return Result(output, np.array(all_ids), np.array(all_weights), np.array(gaps))
