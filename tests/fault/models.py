"""Model folders for the tests, and calls to a cluster that serves them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import expertmesh
import grpc
import ml_dtypes
import numpy as np
from expertmesh.v1 import moe_pb2, moe_pb2_grpc, tensor_pb2

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
OLMOE = GOLDEN / "tiny-olmoe"  # 4 layers, 16 experts, top-4, hidden size 128; trained
SMALL = GOLDEN / "checkpoints" / "mixtral-bf16-e11k2-saved"  # 1 layer, 11 experts, top-2, hidden size 12
NAMES = {"<f4": "F32", "<V2": "BF16", "<f2": "F16"}
TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "I32": np.int32, "I64": np.int64}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    file = path.read_bytes()
    start = 8 + int.from_bytes(file[:8], "little")
    tensors = {}
    for name, entry in json.loads(file[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(file[start + begin : start + end], TYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def write_hidden_states(path: Path, x: np.ndarray) -> Path:
    """What `expertmesh forward` reads: one tensor, float32 or bfloat16."""
    entry = {"dtype": NAMES[x.dtype.str], "shape": x.shape, "data_offsets": [0, x.nbytes]}
    header = json.dumps({"hidden_states": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + x.tobytes())
    return path


def write_checkpoint(
    folder: Path,
    *,
    experts: int,
    top_k: int,
    hidden: int = 16,
    intermediate: int = 8,
    layers: int = 1,
    seed: int = 0,
    zero_gates: bool = False,
    sparse: bool = False,
) -> Path:
    """An OLMoE folder with random bf16 weights; `sparse`: zeros that take no room on the disk."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "olmoe",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp."
        shapes[block + "gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj"):
                shapes[f"{block}experts.{expert}.{name}.weight"] = (intermediate, hidden)
            shapes[f"{block}experts.{expert}.down_proj.weight"] = (hidden, intermediate)
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    generator = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        if sparse:
            file.truncate(8 + len(encoded) + offset)
            return folder
        for name, shape in shapes.items():
            values = generator.standard_normal(shape) / np.sqrt(shape[1])
            if zero_gates and name.endswith(".gate.weight"):
                values[:] = 0
            file.write(values.astype(ml_dtypes.bfloat16).tobytes())
    return folder


def tokens(hidden: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, hidden), np.float32)


def bits(result: expertmesh.ForwardResult) -> tuple[bytes, bytes, bytes]:
    return result.output.tobytes(), result.topk_ids.tobytes(), result.topk_weights.tobytes()


def forward(address: str, layer: int, x: np.ndarray, timeout: float = 60) -> expertmesh.ForwardResult:
    with expertmesh.Client(address, timeout=timeout) as client:
        return client.forward(layer, x)


# The calls below use the stubs that protoc generates and nothing of the SDK.


def stub(address: str, **options: int) -> moe_pb2_grpc.MoeServiceStub:
    """gRPC keeps its default of 4 MiB for replies unless `options` say otherwise."""
    named = [(f"grpc.{name}", value) for name, value in options.items()]
    # Every stub its own connection.
    channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1), *named])
    grpc.channel_ready_future(channel).result(timeout=30)
    return moe_pb2_grpc.MoeServiceStub(channel)


def request(layer: int, x: np.ndarray, **fields: object) -> moe_pb2.ForwardRequest:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_F32, shape=x.shape, data=x.tobytes())
    return moe_pb2.ForwardRequest(**{"layer": layer, "hidden_states": tensor, **fields})


def reply_bits(reply: moe_pb2.ForwardResponse) -> tuple[bytes, bytes, bytes]:
    """Like `bits`."""
    return reply.output.data, reply.topk_ids.data, reply.topk_weights.data
