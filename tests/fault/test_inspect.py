"""What `expertmesh inspect` says of a folder: layers of all kinds, memory, what is skipped or refused."""

from __future__ import annotations

import json
from math import ceil, prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from processes import resident

HIDDEN, WIDTH, SHARED, DENSE, EXPERTS = 10, 6, 14, 22, 7


def write_model(folder: Path) -> Path:
    """Qwen2-MoE: layers 0 and 2 are MoE with a shared expert, layer 1 is dense, 3 predicts further tokens."""
    config = {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "moe_intermediate_size": WIDTH,
        "shared_expert_intermediate_size": SHARED,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "hidden_act": "silu",
    }
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (4, HIDDEN), "model.layers.3.mlp.gate.weight": (1, 1)}

    def add_mlp(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = shapes[f"{prefix}.up_proj.weight"] = (width, HIDDEN)
        shapes[f"{prefix}.down_proj.weight"] = (HIDDEN, width)

    for layer in (0, 2):
        block = f"model.layers.{layer}.mlp"
        shapes[f"{block}.gate.weight"] = (EXPERTS, HIDDEN)
        shapes[f"{block}.shared_expert_gate.weight"] = (1, HIDDEN)
        add_mlp(f"{block}.shared_expert", SHARED)
        for expert in range(EXPERTS):
            add_mlp(f"{block}.experts.{expert}", WIDTH)
    add_mlp("model.layers.1.mlp", DENSE)
    return write_folder(folder, config, {name: ("BF16", shape) for name, shape in shapes.items()})


# Bytes of an element, and the bytes of a one.
ONES = {
    "BF16": np.ones(1, ml_dtypes.bfloat16).tobytes(),
    "F32": np.ones(1, np.float32).tobytes(),
    "F8_E4M3": b"\x38",
    "F8_E8M0": b"\x7f",
    "U8": b"\x7f",
}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    """Every element is a one; tensors: name -> dtype, shape."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        values = ONES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def in_memory(hidden: int, width: int, k_per_line: int, scale_bytes: int = 0, group: int = 1) -> int:
    """Bytes of a gated expert: blocks of 64 output columns, each line of 64 bytes with 16 of them and k_per_line k,
    16 of them after their scales, one for `group` k (0: one for all)."""

    def matrix(blocks: int, k: int) -> int:
        scales = ceil(k / group) if group else 1
        return blocks * 4 * 64 * (ceil(k / k_per_line) + ceil(16 * scales * scale_bytes / 64))

    return matrix(ceil(width / 32), hidden) + matrix(ceil(hidden / 64), width)


def test_layers_of_every_kind_and_the_memory_of_every_server(processes, tmp_path):
    model = write_model(tmp_path / "model")
    done = processes.cli("inspect", model, "--servers", 3, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [layer["kind"] for layer in plan["layers"]] == ["moe", "dense", "moe"]
    routed, shared, dense = (in_memory(HIDDEN, width, 2) for width in (WIDTH, SHARED, DENSE))
    moe = plan["layers"][0]
    assert (moe["num_experts"], moe["top_k"], moe["intermediate_size"]) == (EXPERTS, 2, WIDTH)
    assert (moe["expert_bytes"], moe["weight_dtype"]) == (routed, "BF16")
    assert "scale_layout" not in moe
    assert moe["shared_experts"]["intermediate_size"] == SHARED
    assert moe["shared_experts"]["expert_bytes"] == shared
    assert plan["layers"][1]["num_experts"] == 0
    assert plan["layers"][1]["shared_experts"]["expert_bytes"] == dense
    # Routed experts are split, everything else is on every server.
    everywhere = 2 * shared + dense
    assert [server["bytes"] for server in plan["servers"]] == [2 * n * routed + everywhere for n in (3, 2, 2)]
    assert plan["skipped_tensors"] == ["lm_head.weight", "model.layers.3.mlp.gate.weight"]

    text = processes.cli("inspect", model, "--servers", 3).stdout
    for words in (
        "model type   qwen2_moe",
        "2 of 3 have experts: 0, 2",
        "1 dense, served too: 1",
        f"0, 2: hidden_size {HIDDEN}, intermediate_size {WIDTH}, {EXPERTS} experts, top-2, BF16",
        f"1 shared of intermediate_size {SHARED}",
        f"1: hidden_size {HIDDEN}, dense, intermediate_size {DENSE}",
        "0/3: experts 0-2 of each layer",
        "2 tensors that the served layers do not need",
    ):
        assert words in text


def quantised(method: str, hidden: int, width: int) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """The configuration and the tensors of one layer of five experts, stored as `method` says."""
    config = {
        "model_type": "olmoe",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_experts": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
    }
    block = "model.layers.0.mlp"
    if method == "mxfp4":
        config |= {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
        tensors = {f"{block}.router.weight": ("BF16", (5, hidden)), f"{block}.router.bias": ("BF16", (5,))}
        for name, n, k in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
            tensors[f"{block}.experts.{name}_proj_blocks"] = ("U8", (5, n, k // 32, 16))
            tensors[f"{block}.experts.{name}_proj_scales"] = ("U8", (5, n, k // 32))
            tensors[f"{block}.experts.{name}_proj_bias"] = ("BF16", (5, n))
        return config, tensors
    weights = {"num_bits": 8, "type": "float", "strategy": method}
    config["quantization_config"] = {
        "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "e8m0": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    }.get(
        method,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    )
    tensors = {f"{block}.gate.weight": ("BF16", (5, hidden))}
    for expert in range(5):
        for name, n, k in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            weight = f"{block}.experts.{expert}.{name}_proj.weight"
            tensors[weight] = ("F8_E4M3", (n, k))
            grid = (ceil(n / 128), ceil(k / 128))
            scales = {"channel": ("BF16", (n, 1)), "tensor": ("F32", (1,)), "e8m0": ("F8_E8M0", grid)}
            suffix = "_scale_inv" if method in ("block", "e8m0") else "_scale"
            tensors[weight + suffix] = scales.get(method, ("F32", grid))
            tensors[f"{block}.experts.{expert}.{name}_proj.input_scale"] = ("F32", ())
    return config, tensors


@pytest.mark.parametrize(
    ("method", "dtype", "scales", "words", "memory"),
    [
        ("block", "F8_E4M3", ("F32", "block_128x128"), "F32 scales, one for a block of 128 x 128", (4, 4, 128)),
        ("e8m0", "F8_E4M3", ("F8_E8M0", "block_128x128"), "F8_E8M0 scales, one for a block of 128 x 128", (4, 4, 128)),
        ("channel", "F8_E4M3", ("BF16", "channel"), "BF16 scales, one for an output channel", (4, 4, 0)),
        ("tensor", "F8_E4M3", ("F32", "tensor"), "F32 scales, one for a matrix", (4, 4, 0)),
        ("mxfp4", "F4", ("F8_E8M0", "group_32"), "F8_E8M0 scales, one for 32 weights of a row", (8, 1, 32)),
    ],
)
def test_how_quantised_weights_are_stored(processes, tmp_path, method, dtype, scales, words, memory):
    hidden, width = 288, 160
    model = write_folder(tmp_path / "model", *quantised(method, hidden, width))
    done = processes.cli("inspect", model, "--servers", 2, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    [layer] = plan["layers"]
    assert layer["weight_dtype"] == dtype
    assert (layer["scale_dtype"], layer["scale_layout"]) == scales
    biases = 4 * (ceil(width / 32) + ceil(hidden / 64)) * 64 if method == "mxfp4" else 0
    expert = in_memory(hidden, width, *memory) + biases
    assert layer["expert_bytes"] == expert
    assert [server["bytes"] for server in plan["servers"]] == [3 * expert, 2 * expert]
    # The experts' input_scales; everything else is used.
    assert len(plan["skipped_tensors"]) == (0 if method == "mxfp4" else 15)

    text = processes.cli("inspect", model, "--servers", 2).stdout
    assert f"{dtype} ({words}), " in text
    assert f"{len(plan['skipped_tensors'])} tensors that the served layers do not need" in text


def test_a_server_takes_the_memory_that_is_planned(processes, tmp_path):
    """Most of what it takes is weights: 48 MB of codes, and their scales."""
    config, tensors = quantised("block", 2048, 1536)
    model = write_folder(tmp_path / "model", config, tensors)
    [planned] = [s["bytes"] for s in json.loads(processes.cli("inspect", model, "--json").stdout)["servers"]]
    assert planned > 5 * 3 * 2048 * 1536
    empty = write_folder(tmp_path / "small", *quantised("block", 128, 64))
    used = []
    for folder in (empty, model):
        _, [server], _ = processes.by_hand(folder, 1)
        used.append(resident(server))
    assert planned * 0.98 < used[1] - used[0] < planned * 1.15 + (4 << 20)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' is not supported: packed integers"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format 'pack-quantized'"),
    ],
)
def test_a_quantisation_that_is_not_read_is_refused_by_name(processes, tmp_path, quantization, words):
    config, tensors = quantised("block", 128, 64)
    model = write_folder(tmp_path / "model", config | {"quantization_config": quantization}, tensors)
    done = processes.cli("inspect", model)
    assert done.returncode == 1
    assert words in done.stderr and "supported are fp8" in done.stderr


def test_a_family_that_cannot_be_served_is_refused_with_the_reason(processes, tmp_path):
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "zaya"}))
    done = processes.cli("inspect", model)
    assert done.returncode == 1
    assert "model_type: 'zaya' is not supported: its gate carries a state" in done.stderr
