"""Writes the inputs that fuzzing starts from.

usage: make_seeds.py FOLDER

FOLDER/all/<target>/ has what somebody has thought of: the smallest input that is accepted, valid_*,
reply_* (of a server, where the others are requests) and hostile_*. FOLDER/valid/<target>/ has the first
two of these, FOLDER/smallest/<target>/ the first.

Needs nothing but Python. The safetensors files are those of the format's reference tests, the
attacks on it, and what older writers made; the configurations are those of the supported families
and their edges; the messages are encoded by hand, so that they can be wrong in every way.
"""

import json
import struct
import sys
from pathlib import Path


# ---- safetensors


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors():
    two = {"a": tensor("F32", [2, 2], 0, 16), "b": tensor("BF16", [3], 16, 22)}
    one = {"w": tensor("I32", [2, 2], 0, 16)}
    data = bytes(range(22))
    entry = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    return {
        "smallest": file_of(b"{}"),
        "valid_empty": file_of(b"{}      "),
        "valid_padded": file_of(b" \t\r\n{}\n "),
        "valid_two": file_of(two, data),
        "valid_metadata": file_of({"__metadata__": {"format": "pt"}, **two}, data),
        "valid_null_metadata": file_of({"__metadata__": None, **two}, data),
        "valid_unaligned": file_of({"a": tensor("U8", [1], 0, 1), "b": tensor("F64", [1], 1, 9)}, data[:9]),
        "valid_scalar_and_zero": file_of({"s": tensor("F16", [], 0, 2), "z": tensor("F32", [2, 0], 2, 2)}, data[:2]),
        "valid_below_a_byte": file_of({"q": tensor("F4", [2, 3], 0, 3)}, data[:3]),
        "valid_extra_key": file_of({"w": {**one["w"], "extra": {"deep": [1]}}}, data[:16]),
        "hostile_nothing": b"",
        "hostile_seven_bytes": bytes(7),
        "hostile_length_too_large": bytes.fromhex("3c00000000ffffff") + b"{}",
        "hostile_length_beyond_file": bytes.fromhex("3c00000000000000"),
        "hostile_length_1000": file_of(two, data, length=1000),
        "hostile_not_utf8": file_of(b"\xff"),
        "hostile_bad_json": file_of(b"{"),
        "hostile_list": file_of(b"[]"),
        "hostile_bom": file_of(b"\xef\xbb\xbf{}"),
        "hostile_nul": file_of(b"{}\0"),
        "hostile_depth": file_of(b"[" * 200),
        "hostile_duplicate": file_of(b"{" + entry[1:-1] + b"," + entry[1:], data[:4]),
        "hostile_metadata_number": file_of({"__metadata__": {"a": 1}}),
        "hostile_unknown_dtype": file_of({"w": tensor("F33", [1], 0, 4)}, data[:4]),
        "hostile_negative": file_of({"w": tensor("F32", [-1], 0, 4)}, data[:4]),
        "hostile_float": file_of({"w": tensor("F32", [1.0], 0, 4)}, data[:4]),
        "hostile_all_at_0": file_of({f"t{i}": tensor("F32", [2, 2], 0, 16) for i in range(10)}, data[:16]),
        "hostile_hole": file_of({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 5, 9)}, data[:9]),
        "hostile_overlap": file_of({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 3, 7)}, data[:7]),
        "hostile_backwards": file_of({"a": tensor("U8", [4], 4, 2)}, data[:4]),
        "hostile_overflow": file_of({"w": tensor("F32", [2, 2**64 - 2], 0, 16)}, data[:16]),
        "hostile_overflow_63": file_of({"w": tensor("F32", [2, 2**63 - 1], 0, 16)}, data[:16]),
        "hostile_half_a_byte": file_of({"w": tensor("F4", [1, 3], 0, 1)}, data[:1]),
        "hostile_wrong_size": file_of({"w": tensor("I32", [2, 2], 0, 4)}, data[:4]),
        "hostile_trailer": file_of(one, data[:16] + b"extra_bogus_data_for_polyglot_file"),
        "hostile_two_bytes_short": file_of(one, data[:14]),
    }


# ---- config.json


def config():
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_experts_per_tok": 2, "hidden_act": "silu"}
    mixtral = {**sizes, "model_type": "mixtral", "intermediate_size": 32, "num_local_experts": 8}
    qwen = {
        **sizes,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 8,
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }
    olmoe = {**sizes, "model_type": "olmoe", "intermediate_size": 32, "num_experts": 8, "norm_topk_prob": False}
    groups = {
        **sizes,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    deepseek = {**groups, "model_type": "deepseek_v3", "n_shared_experts": 1, "intermediate_size": 8}
    qwen2 = {**qwen, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 16}
    granite = {**mixtral, "model_type": "granitemoeshared", "shared_intermediate_size": 4}
    nemotron = {
        **groups,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*-",
        "num_hidden_layers": 4,
        "moe_shared_expert_intermediate_size": 4,
        "mlp_hidden_act": "relu2",
    }
    dbrx = {
        "model_type": "dbrx",
        "n_layers": 2,
        "d_model": 8,
        "ffn_config": {
            "ffn_hidden_size": 4,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_normalize_expert_weights": 1,
            "ffn_act_fn": {"name": "silu"},
        },
    }
    compressed = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    }
    families = {
        "kimi_k2": {**deepseek, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
        "deepseek_v2": {**deepseek, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
        "mlp_layer_types": {**deepseek, "model_type": "solar_open", "mlp_layer_types": ["dense", "sparse"]},
        "mimo": {**deepseek, "model_type": "mimo_v2_flash", "moe_layer_freq": [0, 1], "routed_scaling_factor": None},
        "afmoe": {**groups, "model_type": "afmoe", "num_dense_layers": 1, "route_scale": 2.0, "intermediate_size": 8},
        "laguna": {
            **qwen2,
            "model_type": "laguna",
            "first_k_dense_replace": 1,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 30.0,
        },
        "hunyuan": {
            **mixtral,
            "model_type": "hunyuan_v1_moe",
            "moe_topk": [2, 3],
            "moe_intermediate_size": [32, 32],
            "num_shared_expert": [1, 1],
            "num_experts_per_tok": None,
        },
        "ernie": {
            **sizes,
            "model_type": "ernie4_5_moe",
            "intermediate_size": 8,
            "moe_intermediate_size": 4,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_end_index": -1,
            "moe_norm_min": 1e-12,
        },
        "llama4": {
            "model_type": "llama4",
            "text_config": {**mixtral, "model_type": "llama4_text", "intermediate_size_mlp": 64, "moe_layers": [1]},
        },
        "gpt_oss": {**mixtral, "model_type": "gpt_oss", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        "jamba": {**mixtral, "model_type": "jamba", "expert_layer_period": 2, "expert_layer_offset": 1},
        "phimoe": {**mixtral, "model_type": "phimoe", "router_jitter_noise": 0.01},
        "lfm2": {
            **groups,
            "model_type": "lfm2_moe",
            "num_experts": 8,
            "num_dense_layers": 1,
            "intermediate_size": 8,
            "use_expert_bias": True,
        },
        "gemma4": {
            "model_type": "gemma4",
            "text_config": {**qwen, "top_k_experts": 2, "enable_moe_block": True, "rms_norm_eps": 1e-6},
        },
        "longcat": {
            "model_type": "longcat_flash",
            "num_layers": 1,
            "hidden_size": 8,
            "expert_ffn_hidden_size": 4,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "zero_expert_type": "identity",
            "moe_topk": 3,
            "routed_scaling_factor": 6.0,
        },
        "cohere2": {
            **mixtral,
            "model_type": "cohere2_moe",
            "num_shared_experts": 1,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
        },
        "minimax_m2": {**mixtral, "model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True},
        "mistral4": {**groups, "model_type": "mistral4"},
        "hy_v3": {**groups, "model_type": "hy_v3", "router_scaling_factor": 2.0, "num_shared_experts": 1},
        "inside": {"model_type": "see_and_speak", "text_config": qwen2},
        "deepseek_v3": deepseek,
        "qwen2": qwen2,
        "granite": granite,
        "nemotron": nemotron,
        "dbrx": dbrx,
    }
    quantised = {
        "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        "fp8_one_scale": {"quant_method": "fp8", "modules_to_not_convert": ["gate", "lm_head"]},
        "compressed": compressed,
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }
    eight_bits = {"num_bits": 8, "type": "float"}
    refused = {
        "format": {**compressed, "format": "nvfp4-pack-quantized"},
        "sparse": {**compressed, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "groups": {**compressed, "config_groups": {}},
        "strategy": {**compressed, "config_groups": {"a": {"weights": {**eight_bits, "strategy": "x"}}}},
        "int": {**compressed, "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
        "blocks": {"quant_method": "fp8", "weight_block_size": [64, 64]},
        "fmt": {"quant_method": "fp8", "fmt": "e5m2"},
        "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "list": {"quant_method": "mxfp4", "ignore": "lm_head"},
        "awq": {"quant_method": "awq", "bits": 4},
    }
    changed = {
        "smallest": mixtral,
        "valid_qwen3_moe": qwen,
        "valid_olmoe": olmoe,
        "valid_groups": {"model_type": "every_key", "text_config": groups},
        "valid_k_is_e": {**mixtral, "num_experts_per_tok": 8},
        "valid_nulls": {**qwen, "num_local_experts": None, "mlp_only_layers": None},
        "hostile_k_over_e": {**mixtral, "num_experts_per_tok": 9},
        "hostile_no_experts": {**mixtral, "num_local_experts": 0},
        "hostile_negative": {**mixtral, "hidden_size": -1},
        "hostile_huge": {**mixtral, "hidden_size": 2**30, "intermediate_size": 2**30, "num_local_experts": 2**30},
        "hostile_over_63_bits": {**mixtral, "hidden_size": 2**64 - 1},
        "hostile_many_layers": {**mixtral, "num_hidden_layers": 65536},
        "hostile_all_dense": {**qwen, "mlp_only_layers": [0, 1]},
        "hostile_string": {**mixtral, "num_hidden_layers": "2"},
        "hostile_missing": sizes,
        "hostile_contradiction": {**qwen, "num_local_experts": 9},
        "hostile_quantised": {**mixtral, "quantization_config": {"quant_method": "gptq"}},
        "hostile_activation": {**mixtral, "hidden_act": "relu"},
        "hostile_family": {**mixtral, "model_type": "llama"},
        "hostile_groups": {"model_type": "every_key", "text_config": {**groups, "n_group": 3}},
        "hostile_too_few_in_groups": {"model_type": "every_key", "text_config": {**groups, "num_experts_per_tok": 5}},
        "hostile_groups_of_one": {"model_type": "every_key", "text_config": {**groups, "n_group": 8}},
        "hostile_scale": {"model_type": "every_key", "text_config": {**groups, "routed_scaling_factor": 1e300}},
        "hostile_section": {"model_type": "every_key", "text_config": 1},
        "hostile_list": [mixtral],
    }
    changed |= {f"valid_{name}": value for name, value in families.items()}
    changed |= {f"valid_{name}": {**mixtral, "quantization_config": value} for name, value in quantised.items()}
    changed |= {f"hostile_{name}": {**mixtral, "quantization_config": value} for name, value in refused.items()}
    changed["hostile_refused"] = {**mixtral, "model_type": "zaya"}
    changed["hostile_sparsemixer"] = {**families["phimoe"], "num_experts_per_tok": 3}
    changed["hostile_pattern"] = {**nemotron, "hybrid_override_pattern": "ME?-"}
    seeds = {name: json.dumps(value).encode() for name, value in changed.items()}
    seeds["hostile_comment"] = b'{"a": 1 /* no */}'
    seeds["hostile_nan"] = b'{"a": NaN}'
    seeds["hostile_surrogate"] = b'{"a": "\\ud800"}'
    return seeds


# ---- messages


def varint(value):
    value &= 2**64 - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def number(field, value):
    return varint(field << 3) + varint(value)


def block(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def packed(field, values):
    return block(field, b"".join(varint(v) for v in values))


F32, BF16, F16, I32, E4M3, E8M0 = 1, 2, 3, 4, 6, 7


def tensor_of(dtype, shape, data):
    return number(1, dtype) + packed(2, shape) + block(15, data)


def floats(count):
    return struct.pack(f"<{count}f", *(0.25 * (i % 7) - 0.5 for i in range(count)))


def halves(count):
    """The same as bf16: the upper half of each."""
    return b"".join(floats(count)[4 * i + 2 : 4 * i + 4] for i in range(count))


def slice_of(layer, experts, m_sizes, gather, rows, extra=b""):
    return (
        number(1, 7)
        + number(2, layer)
        + number(3, 1)
        + packed(4, experts)
        + packed(5, m_sizes)
        + block(6, struct.pack(f"<{len(gather)}i", *gather))
        + extra
        + block(15, rows)
    )


THREE_WEIGHTS = block(9, struct.pack("<3f", 0.5, 1.0, -2.0))


def quantised_slice(layer, row_format, scales, hidden, more=b""):
    """Two quantised rows of a BF16 request."""
    codes = tensor_of(E4M3, [2, hidden], bytes(7 * i % 120 | (i & 1) << 7 for i in range(2 * hidden)))
    quantised = number(10, row_format) + number(11, BF16) + block(12, scales)
    return slice_of(layer, [0, 2], [2, 1], [0, 1, 1], codes, quantised + more)


def dispatch():
    rows = tensor_of(F32, [2, 4], floats(8))
    wide = tensor_of(BF16, [3, 9], halves(27))
    six = tensor_of(F32, [2, 6], floats(12))
    good = slice_of(0, [0, 2], [2, 1], [0, 1, 1], rows)
    return {
        "smallest": number(3, 1) + block(15, number(1, F32) + packed(2, [0, 4])),
        "valid_two_experts": good,
        "valid_padded": slice_of(0, [0, 3], [4, 2], [0, 1, -1, -1, 1, -1], rows),
        "valid_bf16": slice_of(2, [2], [3], [0, 1, 2], wide),
        "valid_f16": slice_of(2, [0, 2, 3], [1, 1, 1], [0, 0, 0], tensor_of(F16, [1, 9], bytes(18))),
        "valid_no_rows": slice_of(0, [], [], [], tensor_of(F32, [0, 4], b"")),
        "valid_tensor_first": block(15, rows) + number(3, 1) + number(99, 1) + packed(4, [0]) + packed(5, [0]),
        "valid_weighed": slice_of(
            3, [0, 2], [2, 1], [0, 1, 1], six, block(9, struct.pack("<3f", 0.5, 1.0, -2.0))
        ),
        "valid_shared": slice_of(3, [4, 5], [2, 2], [0, 1, 0, 1], six, block(9, struct.pack("<4f", 1, 1, 1, 1))),
        "valid_routed_and_shared": slice_of(
            3, [3, 5], [1, 2], [1, 0, -1], six, block(9, struct.pack("<3f", 3.0, 1.0, 1.0))
        ),
        "valid_mxfp4": slice_of(5, [0, 3], [1, 2], [1, 0, 1], tensor_of(BF16, [2, 2], halves(4))),
        **{f"valid_{name}": quantised_slice(*given) for name, given in {
            "mxfp8": (6, 3, tensor_of(E8M0, [2, 2], b"\x78\x81\x7f\x00"), 33),
            "fp8_block": (7, 2, tensor_of(F32, [2, 1], floats(2)), 5),
            "travels_as_fp8": (0, 2, tensor_of(F32, [2, 1], floats(2)), 4),
            "travels_as_fp8_weighed": (3, 2, tensor_of(F32, [2, 1], floats(2)), 6, THREE_WEIGHTS),
        }.items()},
        "hostile_other_format": quantised_slice(6, 4, tensor_of(E8M0, [2, 2], bytes(4)), 33),
        "hostile_unknown_format": quantised_slice(6, 9, tensor_of(E8M0, [2, 2], bytes(4)), 33),
        "hostile_scales": quantised_slice(6, 3, tensor_of(E8M0, [2, 1], bytes(2)), 33),
        "hostile_no_format": slice_of(6, [0], [1], [0], tensor_of(E4M3, [1, 33], bytes(33))),
        "hostile_native_for_low": slice_of(7, [0], [1], [0], tensor_of(F32, [1, 5], floats(5))),
        "reply_rows": number(1, 7) + block(15, rows),
        "reply_error": number(1, 7) + number(2, 14) + block(3, b"what went wrong"),
        "reply_full": number(1, 7) + number(2, 8) + block(3, b"full") + number(4, 100),
        "hostile_nothing": b"",
        "hostile_cut": good[:-3],
        "hostile_other_expert": slice_of(0, [1], [1], [0], rows),
        "hostile_negative_expert": slice_of(0, [-1], [1], [0], rows),
        "hostile_layer": slice_of(1, [0], [1], [0], rows),
        "hostile_row": slice_of(0, [0], [2], [0, 2], rows),
        "hostile_row_below": slice_of(0, [0], [1], [-2], rows),
        "hostile_sizes": slice_of(0, [0, 2], [2, 2], [0, 1, 1], rows),
        "hostile_sizes_overflow": slice_of(0, [0, 2], [2**63 - 1, 2**63 - 1], [0, 1, 1], rows),
        "hostile_fewer_sizes": slice_of(0, [0, 2], [3], [0, 1, 1], rows),
        "hostile_width": slice_of(0, [0], [1], [0], tensor_of(F32, [2, 3], floats(6))),
        "hostile_no_weights": slice_of(3, [0], [1], [0], six),
        "hostile_weights": slice_of(0, [0], [1], [0], rows, block(9, struct.pack("<f", 1.0))),
        "hostile_nan_weight": slice_of(3, [0], [1], [0], six, block(9, b"\0\0\xc0\x7f")),
        "hostile_shared_elsewhere": slice_of(0, [4], [1], [0], rows),
        "hostile_rank": slice_of(0, [0], [1], [0], tensor_of(F32, [8], floats(8))),
        "hostile_dtype": slice_of(0, [0], [1], [0], tensor_of(I32, [2, 4], floats(8))),
        "hostile_bytes": slice_of(0, [0], [1], [0], tensor_of(F32, [2, 4], floats(7))),
        "hostile_shape": slice_of(0, [0], [1], [0], tensor_of(F32, [2**62, 4], floats(8))),
        "hostile_no_rows_but_wide": slice_of(0, [], [], [], tensor_of(F32, [0, 2**62], b"")),
        "hostile_negative_shape": slice_of(0, [0], [1], [0], tensor_of(F32, [-2, -4], floats(8))),
        "hostile_phase": good + number(3, 2),
        "hostile_long_length": good[:-40] + b"\x7a\xff\xff\xff\xff\x07",
        "hostile_group": b"\x0b" * 150,
    }


def forward():
    rows = block(15, tensor_of(F32, [2, 5], floats(10)))
    return {
        "smallest": block(15, number(1, F32) + packed(2, [0, 5])),
        "valid_f32": number(1, 1) + rows,
        "valid_bf16": number(4, 1) + block(15, tensor_of(BF16, [3, 5], halves(15))),
        "valid_no_tokens": number(1, 0) + block(15, tensor_of(F16, [0, 5], b"")),
        "valid_pins": block(2, b"fingerprint") + number(3, 3) + number(10, 100) + rows,
        **{f"valid_layer_{layer}": number(1, layer) + rows for layer in range(2, 10)},
        "hostile_reserved": number(5, 1) + block(6, b"context") + block(7, tensor_of(I32, [1], bytes(4))) + rows,
        "hostile_layer": number(1, 10) + rows,
        "hostile_shared_logits": number(1, 5) + block(15, tensor_of(F32, [1, 5], struct.pack("<5f", *[3e38] * 5))),
        "hostile_nan": block(15, tensor_of(F32, [1, 5], b"\0\0\xc0\x7f" * 5)),
        "hostile_not_utf8": block(2, b"\xff\xfe") + rows,
        "hostile_two_tensors": rows + rows,
        "hostile_width": block(15, tensor_of(F32, [2, 4], floats(8))),
        "hostile_bytes": block(15, tensor_of(F32, [2, 5], floats(9))),
        "hostile_cut": rows[:-1],
    }


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for make in (safetensors, config, dispatch, forward):
        for name, content in make().items():
            kinds = {"all": True, "valid": name == "smallest" or name.startswith("valid_"), "smallest": name == "smallest"}
            for kind in (kind for kind, of_it in kinds.items() if of_it):
                folder = Path(sys.argv[1]) / kind / make.__name__
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
