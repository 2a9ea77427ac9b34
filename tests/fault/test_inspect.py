"""What `expertmesh inspect` says of a folder: layers of all kinds, memory, what is skipped or refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

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
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, shape in shapes.items():
        values = np.ones(shape, ml_dtypes.bfloat16).tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def test_layers_of_every_kind_and_the_memory_of_every_server(processes, tmp_path):
    model = write_model(tmp_path / "model")
    done = processes.cli("inspect", model, "--servers", 3, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [layer["kind"] for layer in plan["layers"]] == ["moe", "dense", "moe"]
    routed, shared, dense = (3 * HIDDEN * width * 2 for width in (WIDTH, SHARED, DENSE))
    moe = plan["layers"][0]
    assert (moe["num_experts"], moe["top_k"], moe["intermediate_size"]) == (EXPERTS, 2, WIDTH)
    assert (moe["expert_bytes"], moe["weight_dtype"]) == (routed, "BF16")
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


def test_a_family_that_cannot_be_served_is_refused_with_the_reason(processes, tmp_path):
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "zaya"}))
    done = processes.cli("inspect", model)
    assert done.returncode == 1
    assert "model_type: 'zaya' is not supported: its gate carries a state" in done.stderr
