"""Writes the inputs that fuzzing starts from.

usage: make_seeds.py FOLDER

FOLDER/seeds/<target>/smallest is the smallest input that is accepted, FOLDER/known/<target>/ has
others that somebody has thought of: valid_* and hostile_*.

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


F32, BF16, F16, I32 = 1, 2, 3, 4


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


def weights(count):
    return block(9, floats(count))


def dispatch():
    rows = tensor_of(F32, [2, 4], floats(8))
    wide = tensor_of(BF16, [3, 9], halves(27))
    five = tensor_of(F32, [2, 5], floats(10))
    good = slice_of(0, [0, 2], [2, 1], [0, 1, 1], rows)
    return {
        "smallest": number(3, 1) + block(15, number(1, F32) + packed(2, [0, 4])),
        "valid_two_experts": good,
        "valid_padded": slice_of(0, [0, 3], [4, 2], [0, 1, -1, -1, 1, -1], rows),
        "valid_bf16": slice_of(2, [2], [3], [0, 1, 2], wide),
        "valid_f16": slice_of(2, [0, 2, 3], [1, 1, 1], [0, 0, 0], tensor_of(F16, [1, 9], bytes(18))),
        "valid_no_rows": slice_of(0, [], [], [], tensor_of(F32, [0, 4], b"")),
        "valid_tensor_first": block(15, rows) + number(3, 1) + number(99, 1) + packed(4, [0]) + packed(5, [0]),
        "valid_weighed": slice_of(4, [0, 4], [2, 2], [0, 1, -1, 1], five, weights(4)),
        "hostile_fewer_weights": slice_of(4, [0, 4], [2, 2], [0, 1, 0, 1], five, weights(3)),
        "hostile_weights": slice_of(0, [0], [2], [0, 1], rows, weights(2)),
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
        "valid_pins": block(2, b"fingerprint") + number(3, 9) + number(10, 100) + rows,
        "hostile_reserved": number(5, 1) + block(6, b"context") + block(7, tensor_of(I32, [1], bytes(4))) + rows,
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
            kind = "seeds" if name == "smallest" else "known"
            folder = Path(sys.argv[1]) / kind / make.__name__
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
