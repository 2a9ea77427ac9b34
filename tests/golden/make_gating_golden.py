#!/usr/bin/env python3
"""Writes gating.json: what the gates of the model families give for fixed logits.

One restatement of the router descriptor in float64, standard library only, sharing no code with
the router. Each case names the fields of RouterDescriptor that differ from their defaults. The
cases with `published` numbers are checked against them, digit by digit, before anything is written.
The random ones are drawn from a fixed seed, away from ties, for the descriptor of every family.

    tests/golden/make_gating_golden.py
"""

import json
import math
import pathlib
import random
import struct

Z = [0.5, -1.25, 2.0, 0.0, 1.75, -0.5, 1.0, 1.5]
B = [0.25, 0.0, -0.5, 0.75, -0.125, 0.5, 0.0, -0.25]
PER_EXPERT = [1.0, 1.25, 0.5, 2.0, 1.5, 1.0, 0.75, 1.0]
# Every biased sigmoid is negative: experts of masked groups win where the mask is filled with 0.
Z_NEGATIVE = [-2.0, -2.5, -3.0, -2.25, -1.0, -4.0, -3.5, -2.75]
B_NEGATIVE = [-0.4, -0.3, -0.2, -0.5, -0.6, -0.1, -0.3, -0.2]

# Selected where the bias is kept in fp32; in bf16 both biases are 5.0 and the greater logit wins.
BIAS_FP32 = [5.0, 5.015, 0.0, 0.0]

V3 = {"score": "sigmoid", "norm": "sum", "norm_epsilon": 1e-20}
V3_GROUPS = {**V3, "group_score": "top2_sum", "num_groups": 4, "topk_groups": 2}


def round_to_bf16(value):
    bits, = struct.unpack("<I", struct.pack("<f", value))
    bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def case(name, top_k, fields, logits, ids=None, published=None, **per_expert):
    """A case; `ids` and `published` (decimal strings) are what is known of the result."""
    return {
        "name": name,
        "router": {"top_k": top_k, **fields},
        "logits": logits,
        "logits_bias": per_expert.get("logits_bias", []),
        "selection_bias": per_expert.get("selection_bias", []),
        "per_expert_scale": per_expert.get("per_expert_scale", []),
        "known_ids": ids,
        "published": published.split() if published else None,
    }


CASES = [
    case("Mixtral, Qwen3-MoE, MiniMax-M1, Hunyuan", 2, {"norm": "sum"}, Z, [2, 4],
         "0.562176501 0.437823499"),
    case("Qwen2-MoE, OLMoE, Jamba", 2, {}, Z, [2, 4], "0.309354681 0.240925668"),
    case("DBRX p = 1", 2, {"norm": "p_norm", "norm_p": 1.0}, Z, [2, 4], "0.562176501 0.437823499"),
    case("DBRX p = 2", 2, {"norm": "p_norm", "norm_p": 2.0}, Z, [2, 4], "0.788960919 0.614443381"),
    case("gpt-oss, GraniteMoE, Cohere2 softmax", 2, {"order": "topk_then_score"}, Z, [2, 4],
         "0.562176501 0.437823499"),
    case("gpt-oss with its logits bias", 2, {"order": "topk_then_score"}, [z - b for z, b in zip(Z, B)],
         [2, 4], "0.562176501 0.437823499", logits_bias=B),
    case("Llama-4", 1, {"score": "sigmoid", "order": "topk_then_score", "weigh_input": True}, Z, [2],
         "0.880797078"),
    case("Cohere2 sigmoid", 2, {"score": "sigmoid", "order": "topk_then_score", "norm": "sum"}, Z,
         [2, 4], "0.508323266 0.491676734"),
    case("DeepSeek-V2 greedy", 2, {"scale": 1.0}, Z, [2, 4], "0.309354681 0.240925668"),
    case("DeepSeek-V2 group-limited", 3,
         {"group_score": "max", "num_groups": 4, "topk_groups": 2, "mask_fill": "zero",
          "scale": 16.0}, Z, [2, 4, 3], "4.949674902 3.854810689 0.669865655"),
    case("DeepSeek-V3", 3, {**V3_GROUPS, "scale": 2.5}, Z, [3, 5, 4],
         "0.722754969 0.545738789 1.231506242", selection_bias=B),
    case("DeepSeek-V3 without groups, GLM-4.5, Kimi-K2", 3, {**V3, "scale": 2.5}, Z, [3, 5, 0],
         "0.833333333 0.629234448 1.037432219", selection_bias=B),
    case("DeepSeek-V3, one group", 3,
         {**V3, "group_score": "top2_sum", "num_groups": 1, "topk_groups": 1, "scale": 2.5}, Z,
         [3, 5, 0], "0.833333333 0.629234448 1.037432219", selection_bias=B),
    case("MiniMax-M2", 3, {"score": "sigmoid", "norm": "sum"}, Z, [3, 5, 0],
         "0.333333333 0.251693779 0.414972887", selection_bias=B),
    case("MiniMax-M3: the scale multiplies the routed sum, not the weights", 3,
         {"score": "sigmoid", "norm": "sum", "routed_scale": 2.0}, Z, [3, 5, 0],
         "0.333333333 0.251693779 0.414972887", selection_bias=B),
    case("ERNIE-4.5", 3, {"norm": "sum_clamped", "norm_epsilon": 1e-12}, Z, [3, 5, 0],
         "0.307195886 0.186323723 0.506480391", selection_bias=B),
    case("LongCat", 3, {"scale": 6.0}, Z, [3, 5, 0], "0.251199621 0.152360272 0.414158158",
         selection_bias=B),
    case("LongCat, the last three ids are identity experts", 3,
         {"scale": 6.0, "identity_experts": 3}, Z, [3, 5, 0], "0.251199621 0.152360272 0.414158158",
         selection_bias=B),
    case("DeepSeek-V4", 3,
         {"score": "sqrt_softplus", "norm": "sum", "norm_epsilon": 1e-20, "scale": 1.5}, Z,
         [3, 4, 0], "0.390062921 0.647536277 0.462400802", selection_bias=B),
    case("Gemma-4", 2, {"norm": "sum"}, Z, [2, 4], "0.281088250 0.656735249",
         per_expert_scale=PER_EXPERT),
    case("Mistral-4", 3,
         {"group_score": "top2_sum", "num_groups": 4, "topk_groups": 2, "mask_fill": "zero",
          "norm": "sum", "norm_epsilon": 1e-20}, Z, [2, 7, 6],
         "0.506480391 0.307195886 0.186323723"),
    case("Laguna: soft cap", 3, {"score": "sigmoid", "norm": "sum", "softcap": 1.5}, Z,
         selection_bias=B),
    case("LFM2-MoE: epsilon 1e-6", 3,
         {"score": "sigmoid", "norm": "sum", "norm_epsilon": 1e-6}, [z - 10.0 for z in Z],
         selection_bias=B),
    case("ERNIE-4.5: the clamp at 1e-12 holds", 2, {"norm": "sum_clamped", "norm_epsilon": 1e-12},
         [0.0, -30.0, -31.0, -32.0], [1, 2], selection_bias=[-1.0, 0.5, 0.25, 0.0]),
    case("negative selection scores, masked with -infinity", 3, {**V3_GROUPS, "scale": 2.5},
         Z_NEGATIVE, [5, 7, 6], selection_bias=B_NEGATIVE),
    case("negative selection scores, masked with 0", 3,
         {**V3_GROUPS, "mask_fill": "zero", "scale": 2.5}, Z_NEGATIVE, [0, 1, 2],
         selection_bias=B_NEGATIVE),
    case("the weight is the unbiased score, not the selected one minus the bias", 2,
         {**V3, "scale": 2.5}, [-16.0, -17.0, -18.0, -19.0], [0, 1], "1.8276464 0.6723536",
         selection_bias=[12.0] * 4),
    case("epsilon 1e-20 is part of the formula", 2, V3, [-60.0, -61.0], [0, 1],
         "0.000000876 0.000000322"),
    case("one slot, normalised", 1, {**V3, "scale": 2.5}, Z, [3], "2.500000000", selection_bias=B),
    case("all experts selected", 8, {"norm": "sum"}, Z, [2, 4, 7, 6, 0, 3, 5, 1]),
    case("ties", 3, {}, [1.0, 2.0, 2.0, 0.5, 2.0, 1.0, 2.0, 0.0], [1, 2, 4]),
    case("ties between groups", 2,
         {"group_score": "max", "num_groups": 4, "topk_groups": 2}, [1.0] * 8, [0, 1]),
    case("a bias in fp32 selects", 1, V3, [0.05, 0.0, -9.0, -9.0], [1], "1.000000000",
         selection_bias=BIAS_FP32),
    case("the same bias in bf16 selects another", 1, V3, [0.05, 0.0, -9.0, -9.0], [0],
         "1.000000000", selection_bias=[round_to_bf16(b) for b in BIAS_FP32]),
    case("Phi-3.5-MoE", 2, {"score": "sparsemixer", "jitter": 0.01}, Z, [2, 4],
         "1.000000000 1.000000000"),
    case("Phi-3.5-MoE, jitter 0.1: two survivors", 2, {"score": "sparsemixer", "jitter": 0.1}, Z,
         [2, 4], "0.562176501 0.562176501"),
    case("sparsemixer, zeros: 0 / 0 survives", 2, {"score": "sparsemixer", "jitter": 0.01},
         [0.0] * 4, [0, 1], "0.250000000 0.333333333"),
    case("sparsemixer, ties", 2, {"score": "sparsemixer", "jitter": 0.01},
         [1.0, 2.0, 2.0, 0.5, 2.0, 1.0], [1, 2], "0.333333333 0.500000000"),
    case("sparsemixer, negative logits", 2, {"score": "sparsemixer", "jitter": 0.1},
         [-4.0, -1.0, -1.125, -1.5, -1.25], [1, 2]),
    case("sparsemixer, two experts", 2, {"score": "sparsemixer", "jitter": 0.5}, [1.5, 1.75],
         [1, 0], "0.562176501 1.000000000"),
    case("sparsemixer, the greatest logit is 0", 2, {"score": "sparsemixer", "jitter": 0.6},
         [-1.0, 0.0, -2.0], [1, 0]),
    case("large logits", 2, {"norm": "sum"}, [80.0, -3e38, 3e38, 1.0], [2, 0]),
]

# Families for the random cases: fields of the descriptor, sizes (experts, top_k), per-expert inputs.
FAMILIES = {
    "Mixtral, Qwen3-MoE, Qwen3-Next, Hunyuan": ({"norm": "sum"}, [(8, 2), (128, 8), (5, 5)], ()),
    "Qwen2-MoE, OLMoE, Jamba": ({}, [(60, 4), (64, 8), (16, 2)], ()),
    "DBRX": ({"norm": "p_norm", "norm_p": 1.0}, [(16, 4)], ()),
    "DBRX, p = 2": ({"norm": "p_norm", "norm_p": 2.0}, [(16, 4)], ()),
    "gpt-oss": ({"order": "topk_then_score"}, [(32, 4), (5, 5)], ("logits_bias",)),
    "GraniteMoE, Cohere2": ({"order": "topk_then_score"}, [(40, 8), (7, 1)], ()),
    "Cohere2, sigmoid": (
        {"score": "sigmoid", "order": "topk_then_score", "norm": "sum"}, [(11, 3), (11, 1)], ()),
    "Llama-4": (
        {"score": "sigmoid", "order": "topk_then_score", "weigh_input": True}, [(16, 1), (9, 3)], ()),
    "DeepSeek-V2-Lite": ({"scale": 1.0}, [(64, 6)], ()),
    "DeepSeek-V2": (
        {"group_score": "max", "num_groups": 8, "topk_groups": 3, "mask_fill": "zero",
         "scale": 16.0}, [(160, 6)], ()),
    "DeepSeek-V3": (
        {**V3, "group_score": "top2_sum", "num_groups": 8, "topk_groups": 4, "scale": 2.5},
        [(128, 8), (16, 8)], ("selection_bias",)),
    "Kimi-K2": ({**V3, "scale": 2.827}, [(48, 8)], ("selection_bias",)),
    "GLM-4.5, dots1, HY-V3": ({**V3, "scale": 2.5}, [(40, 8), (13, 1)], ("selection_bias",)),
    "Nemotron-3": ({**V3, "scale": 5.0}, [(64, 22)], ("selection_bias",)),
    "MiniMax-M2": ({"score": "sigmoid", "norm": "sum"}, [(64, 8)], ("selection_bias",)),
    "ERNIE-4.5": (
        {"norm": "sum_clamped", "norm_epsilon": 1e-12}, [(64, 6)], ("selection_bias",)),
    "LFM2-MoE": (
        {"score": "sigmoid", "norm": "sum", "norm_epsilon": 1e-6}, [(32, 4)], ("selection_bias",)),
    "LongCat": ({"scale": 6.0, "identity_experts": 8}, [(24, 12)], ("selection_bias",)),
    "DeepSeek-V4": (
        {"score": "sqrt_softplus", "norm": "sum", "norm_epsilon": 1e-20, "scale": 1.5}, [(48, 6)],
        ("selection_bias",)),
    "Gemma-4": ({"norm": "sum"}, [(128, 8)], ("per_expert_scale",)),
    "Mistral-4": (
        {"group_score": "top2_sum", "num_groups": 4, "topk_groups": 2, "mask_fill": "zero",
         "norm": "sum", "norm_epsilon": 1e-20}, [(32, 4)], ()),
    "A.X-K2": (
        {**V3, "group_score": "top2_sum", "num_groups": 4, "topk_groups": 2, "mask_fill": "zero"},
        [(32, 4)], ("selection_bias",)),
    "Laguna": ({"score": "sigmoid", "norm": "sum", "softcap": 3.0}, [(64, 8)], ("selection_bias",)),
    "Phi-3.5-MoE": ({"score": "sparsemixer", "jitter": 0.01}, [(16, 2)], ()),
    "Phi-3.5-MoE, more survivors": ({"score": "sparsemixer", "jitter": 0.25}, [(16, 2), (3, 2)], ()),
}
RANDOM_TOKENS = 2
MIN_GAP = 1e-6  # between any two numbers whose order decides in a random case


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def softmax(z):
    largest = max(z)
    exponentials = [math.exp(v - largest) for v in z]
    return [v / math.fsum(exponentials) for v in exponentials]


def sqrt_softplus(z):
    return math.sqrt(max(z, 0.0) + math.log1p(math.exp(-abs(z))))


def best(values, count):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def score(kind, z):
    if kind == "softmax":
        return softmax(z)
    return [{"sigmoid": sigmoid, "sqrt_softplus": sqrt_softplus}[kind](v) for v in z]


def least_gap(values, count, ordered):
    """Between the `count` largest and the next; where their order matters, between any two of these."""
    largest = sorted(values, reverse=True)[:count + 1]
    gaps = [a - b for a, b in zip(largest, largest[1:])]
    return min(gaps if ordered else gaps[count - 1:], default=math.inf)


def group_scores(choice, router):
    size = len(choice) // router["num_groups"]
    used = 1 if router["group_score"] == "max" else 2
    return [sum(sorted(choice[g:g + size])[-used:]) for g in range(0, len(choice), size)]


def mask_groups(choice, scores, router):
    size = len(choice) // router["num_groups"]
    kept = best(scores, router["topk_groups"])
    fill = 0.0 if router.get("mask_fill") == "zero" else -math.inf
    return [c if i // size in kept else fill for i, c in enumerate(choice)]


def sparsemixer(z, jitter):
    """(ids, weights): the best of all logits, and of the others; each in a softmax of those near it."""
    ids, weights = [], []
    for _ in range(2):
        rest = [i for i in range(len(z)) if i not in ids]
        top = max(z[i] for i in rest)

        def near(i):
            factor = max(abs(z[i]), top)
            return factor == 0.0 or not (top - z[i]) / factor > 2 * jitter

        near_ids = [i for i in rest if near(i)]
        ids.append(next(i for i in rest if z[i] == top))
        weights.append(1 / math.fsum(math.exp(z[i] - top) for i in near_ids))
    return ids, weights


def route(c):
    """(ids, weights) of one token."""
    return route_and_gap(c)[:2]


def route_and_gap(c, ordered=True):
    """(ids, weights, the least difference between two numbers whose order decides).

    ordered: the order of the ids matters too, not only which they are.
    """
    router = c["router"]
    z = [a + b for a, b in zip(c["logits"], c["logits_bias"] or [0.0] * len(c["logits"]))]
    if cap := router.get("softcap", 0.0):
        z = [math.tanh(v / cap) * cap for v in z]
    kind = router.get("score", "softmax")
    if kind == "sparsemixer":
        edges = [abs((top - v) / max(abs(v), top) - 2 * router["jitter"])
                 for top in sorted(z)[-2:] for v in z if max(abs(v), top) > 0]
        return *sparsemixer(z, router["jitter"]), min([*edges, least_gap(z, 2, True)])
    late = router.get("order") == "topk_then_score"
    values = z if late else score(kind, z)
    choice = [v + b for v, b in zip(values, c["selection_bias"] or [0.0] * len(z))]
    gap = math.inf
    if "group_score" in router:
        scores = group_scores(choice, router)
        gap = least_gap(scores, router["topk_groups"], False)
        choice = mask_groups(choice, scores, router)
    ids = best(choice, router["top_k"])
    gap = min(gap, least_gap(choice, router["top_k"], ordered))
    weights = score(kind, [z[i] for i in ids]) if late else [values[i] for i in ids]

    norm = router.get("norm")
    epsilon = router.get("norm_epsilon", 0.0)
    if norm == "sum":
        divisor = sum(weights) + epsilon
    elif norm == "sum_clamped":
        divisor = max(sum(weights), epsilon)
    elif norm == "p_norm":
        divisor = sum(w ** router["norm_p"] for w in weights) ** (1 / router["norm_p"])
    else:
        divisor = 1.0
    scales = c["per_expert_scale"] or [1.0] * len(z)
    factor = router.get("scale", 1.0) / divisor
    return ids, [w * factor * scales[i] for i, w in zip(ids, weights)], gap


def random_cases():
    draw = random.Random(20)
    for name, (fields, sizes, given) in FAMILIES.items():
        for experts, top_k in sizes:
            count = experts + fields.get("identity_experts", 0)

            def values(mean, deviation):
                # Multiples of 2^-10, which fp32 holds too.
                return [round(draw.gauss(mean, deviation) * 1024) / 1024 for _ in range(count)]

            spread = {"logits_bias": (0, 1), "selection_bias": (0, 0.2), "per_expert_scale": (1, 0.3)}
            per_expert = {name: values(*spread[name]) for name in given}
            found = 0
            while found < RANDOM_TOKENS:
                c = case(f"{name}: {top_k} of {experts}, random {found}", top_k, dict(fields),
                         values(0, 2), **per_expert)
                if route_and_gap(c)[2] >= MIN_GAP:
                    found += 1
                    yield c


def main():
    out = []
    for c in [*CASES, *random_cases()]:
        ids, weights = route(c)
        known_ids, published = c.pop("known_ids"), c.pop("published")
        if known_ids is not None and ids != known_ids:
            raise SystemExit(f"{c['name']}: ids {ids}, known {known_ids}")
        if published is not None:
            given = [f"{w:.{len(p.split('.')[1])}f}" for w, p in zip(weights, published)]
            if given != published or len(weights) != len(published):
                raise SystemExit(f"{c['name']}: weights {given}, published {published}")
        c["router"]["num_experts"] = len(c["logits"]) - c["router"].get("identity_experts", 0)
        out.append({**c, "ids": ids, "weights": weights})
    path = pathlib.Path(__file__).with_name("gating.json")
    lines = ",\n".join(json.dumps(c) for c in out)
    path.write_text(f'{{"cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{path.name}: {len(out)} cases")


if __name__ == "__main__":
    main()
