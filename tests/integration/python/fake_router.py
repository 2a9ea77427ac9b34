"""A router in plain numpy, as a test double: it computes what MoeService.Forward promises, row by row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
from expertmesh.v1 import cluster_pb2, moe_pb2, moe_pb2_grpc, tensor_pb2

DTYPES = {
    tensor_pb2.DATA_TYPE_F32: np.dtype(np.float32),
    tensor_pb2.DATA_TYPE_BF16: np.dtype(ml_dtypes.bfloat16),
    tensor_pb2.DATA_TYPE_F16: np.dtype(np.float16),
}


@dataclass
class MoeLayer:
    """Weights of one MoE block, float32: gate [E + I, D], gate_up [E, 2F, D], down [E, D, F]; the I last
    experts return their input."""

    gate: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    top_k: int
    renormalise: bool = True

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """x float32 [T, D] -> output float32 [T, D], ids [T, K], weights [T, K], logits [T, E + I].

        Every row is computed on its own, so that its bits do not depend on the others.
        """
        logits = np.empty((len(x), len(self.gate)), np.float32)
        ids = np.empty((len(x), self.top_k), np.int32)
        weights = np.empty((len(x), self.top_k), np.float32)
        output = np.zeros_like(x)
        for t, row in enumerate(x):
            logits[t] = self.gate @ row
            scores = np.exp(logits[t] - logits[t].max())
            scores /= scores.sum()
            ids[t] = np.argsort(-scores, kind="stable")[: self.top_k]
            weights[t] = scores[ids[t]]
            if self.renormalise:
                weights[t] /= weights[t].sum()
            for expert, weight in zip(ids[t], weights[t]):
                if expert >= len(self.down):
                    output[t] += weight * row
                    continue
                gate, up = np.split(self.gate_up[expert] @ row, 2)
                output[t] += weight * (self.down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return output, ids, weights, logits


def random_layer(
    seed: int,
    *,
    hidden: int = 24,
    intermediate: int = 16,
    experts: int = 5,
    top_k: int = 2,
    identity: int = 0,
) -> MoeLayer:
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32) / np.sqrt(np.float32(shape[-1]))

    return MoeLayer(
        gate=normal(experts + identity, hidden),
        gate_up=normal(experts, 2 * intermediate, hidden),
        down=normal(experts, hidden, intermediate),
        top_k=top_k,
    )


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, as float32."""
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    tensors = {}
    for path in folder.glob("*.safetensors"):
        file = path.read_bytes()
        start = 8 + int.from_bytes(file[:8], "little")
        for name, entry in json.loads(file[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                flat = np.frombuffer(file[start + begin : start + end], dtypes[entry["dtype"]])
                tensors[name] = flat.reshape(entry["shape"]).astype(np.float32)
    return tensors


def checkpoint_layers(folder: Path) -> dict[int, MoeLayer]:
    """The MoE blocks of a checkpoint of mixtral, qwen3_moe or olmoe, in either layout."""
    config = json.loads((folder / "config.json").read_text())
    mixtral = config["model_type"] == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    tensors = read_tensors(folder)
    layers = {}
    for router in [name for name in tensors if name.endswith(".gate.weight")]:
        block = router.removesuffix("gate.weight")

        def stacked(name: str) -> np.ndarray:
            experts = range(len(tensors[router]))
            return np.stack([tensors[f"{block}experts.{e}.{name}.weight"] for e in experts])

        fused = block + "experts.gate_up_proj" in tensors
        layers[int(router.split(".")[2])] = MoeLayer(
            gate=tensors[router],
            gate_up=tensors[block + "experts.gate_up_proj"]
            if fused
            else np.concatenate([stacked(gate), stacked(up)], axis=1),
            down=tensors[block + "experts.down_proj"] if fused else stacked(down),
            top_k=config["num_experts_per_tok"],
            renormalise=mixtral or config["norm_topk_prob"],
        )
    return layers


def to_tensor(data_type: int, array: np.ndarray) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=data_type, shape=array.shape, data=array.tobytes())


@dataclass
class FakeRouter(moe_pb2_grpc.MoeServiceServicer):
    """Serves `layers` at `listen`, on a port of the kernel's choice by default, until `stop()`. It says that
    they have shared experts, but computes none.

    message_limit bounds requests as gRPC does; `requests` and `replies` record the sizes of all Forward
    messages; `before` is called first in every Forward and may sleep or abort.
    """

    layers: dict[int, MoeLayer]
    model_type: str = "mixtral"
    listen: str = "127.0.0.1:0"
    message_limit: int = 64 << 20
    before: Callable[[grpc.ServicerContext], None] | None = None
    requests: list[int] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16),
            options=[
                ("grpc.max_receive_message_length", self.message_limit),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ],
        )
        moe_pb2_grpc.add_MoeServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.listen)
        self.address = self.listen.replace(":0", f":{port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def __enter__(self) -> FakeRouter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def Forward(
        self, request: moe_pb2.ForwardRequest, context: grpc.ServicerContext
    ) -> moe_pb2.ForwardResponse:
        self.requests.append(request.ByteSize())
        if self.before is not None:
            self.before(context)
        layer = self.layers.get(request.layer)
        if layer is None:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"layer: expected one of {sorted(self.layers)}, given {request.layer}",
            )
        if request.model_fingerprint not in ("", "fake"):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "model_fingerprint: expected fake")
        hidden = request.hidden_states
        if hidden.shape[1] != layer.gate.shape[1]:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"hidden_states.shape: expected {layer.gate.shape[1]} columns, given {hidden.shape[1]}",
            )
        dtype = DTYPES[hidden.dtype]
        x = np.frombuffer(hidden.data, dtype).reshape(tuple(hidden.shape)).astype(np.float32)
        output, ids, weights, logits = layer(x)
        reply = moe_pb2.ForwardResponse(
            topk_ids=to_tensor(tensor_pb2.DATA_TYPE_I32, ids),
            topk_weights=to_tensor(tensor_pb2.DATA_TYPE_F32, weights),
            output=to_tensor(hidden.dtype, output.astype(dtype)),
        )
        if request.return_router_logits:
            reply.router_logits.CopyFrom(to_tensor(tensor_pb2.DATA_TYPE_F32, logits))
        self.replies.append(reply.ByteSize())
        return reply

    def GetModel(self, request, context) -> moe_pb2.GetModelResponse:
        infos = []
        for index, layer in sorted(self.layers.items()):
            experts, hidden, intermediate = layer.down.shape
            infos.append(
                moe_pb2.LayerInfo(
                    layer=index,
                    kind=moe_pb2.LayerInfo.KIND_MOE,
                    hidden_size=hidden,
                    intermediate_size=intermediate,
                    num_experts=experts,
                    top_k=layer.top_k,
                    weight_dtype="F32",
                    format="native",
                    pad_multiple=1,
                    num_shared_experts=2,
                    shared_intermediate_size=7,
                    num_identity_experts=len(layer.gate) - experts,
                )
            )
        return moe_pb2.GetModelResponse(model_fingerprint="fake", model_type=self.model_type, layers=infos)

    def GetCluster(self, request, context) -> moe_pb2.GetClusterResponse:
        held = [
            cluster_pb2.LayerExperts(layer=index, expert_ids=range(len(layer.down)))
            for index, layer in sorted(self.layers.items())
        ]
        server = cluster_pb2.ServerInfo(
            name="server-0",
            address="127.0.0.1:7080",
            pid=1234,
            state=cluster_pb2.ServerInfo.STATE_SERVING,
            layers=held,
            rows=7,
            numerics="fake",
        )
        return moe_pb2.GetClusterResponse(placement_epoch=3, servers=[server], serving=True, version="0.1.0")


def sleep_while_active(seconds: float) -> Callable[[grpc.ServicerContext], None]:
    """A `before` that waits, but not for a caller that has gone."""

    def before(context: grpc.ServicerContext) -> None:
        end = time.monotonic() + seconds
        while context.is_active() and time.monotonic() < end:
            time.sleep(0.01)

    return before
