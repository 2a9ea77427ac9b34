"""The contract needs no SDK: stubs that protoc generates are enough to call a cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
from fake_router import checkpoint_layers

REPOSITORY = Path(__file__).resolve().parents[3]
CHECKPOINT = REPOSITORY / "tests/golden/checkpoints/mixtral-bf16-e11k2-saved"

CALLER = """
    import sys
    import grpc
    import numpy as np
    from expertmesh.v1 import moe_pb2, moe_pb2_grpc, tensor_pb2

    assert moe_pb2.__file__.startswith(sys.argv[2]), moe_pb2.__file__
    x = np.load(sys.argv[2] + "/x.npy")
    stub = moe_pb2_grpc.MoeServiceStub(grpc.insecure_channel(sys.argv[1]))
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_F32, shape=x.shape, data=x.tobytes())
    reply = stub.Forward(moe_pb2.ForwardRequest(layer=0, hidden_states=tensor), timeout=30)
    assert reply.output.dtype == tensor_pb2.DATA_TYPE_F32
    y = np.frombuffer(reply.output.data, np.float32).reshape(tuple(reply.output.shape))
    np.save(sys.argv[2] + "/y.npy", y)
"""


def test_forward_with_generated_stubs_only(cluster, tmp_path):
    protos = sorted((REPOSITORY / "proto/expertmesh/v1").glob("*.proto"))
    plugin = subprocess.run(["which", "grpc_python_plugin"], capture_output=True, text=True, check=True)
    subprocess.run(
        ["protoc", f"--proto_path={REPOSITORY / 'proto'}", f"--python_out={tmp_path}",
         f"--grpc_out={tmp_path}", f"--plugin=protoc-gen-grpc={plugin.stdout.strip()}", *protos],
        check=True,
    )  # fmt: skip
    # The SDK's package of this name is installed here, and would be preferred to a folder without these.
    (tmp_path / "expertmesh/__init__.py").touch()
    (tmp_path / "expertmesh/v1/__init__.py").touch()
    layer = checkpoint_layers(CHECKPOINT)[0]
    x = np.random.default_rng(0).standard_normal((7, layer.gate.shape[1]), np.float32)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "caller.py").write_text(textwrap.dedent(CALLER))
    subprocess.run(
        [sys.executable, tmp_path / "caller.py", cluster(CHECKPOINT, 2), str(tmp_path)],
        check=True,
        timeout=60,
    )
    expected = layer(x)[0]
    difference = np.linalg.norm(np.load(tmp_path / "y.npy") - expected)
    assert difference <= 1e-5 * np.linalg.norm(expected)
