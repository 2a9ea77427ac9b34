"""Calls of every size: over gRPC's default limit, over protobuf's, over 2^31 elements."""

from __future__ import annotations

import time
from pathlib import Path

import expertmesh
import grpc
import ml_dtypes
import numpy as np
import pytest
from models import bits, read_safetensors, request, stub, tokens, write_checkpoint, write_hidden_states
from processes import Processes, peak_memory

MIB = 1 << 20
# Of the router while a client has two messages of 64 MiB under way: each is there as received, as rows, as output
# and as a reply, and the allocator keeps as much again. However long the call is.
PEAK = 2048 * MIB


def command_output(processes: Processes, address: str, x: np.ndarray, folder: Path, seconds: float = 60) -> bytes:
    """What `expertmesh forward` writes for it."""
    files = ("--input", write_hidden_states(folder / "x.safetensors", x), "--output", folder / "y.safetensors")
    done = processes.cli(
        "forward", "--router", address, "--layer", 0, *files, "--timeout", seconds, seconds=seconds + 30
    )
    assert done.returncode == 0, done.stderr
    output = read_safetensors(folder / "y.safetensors")["output"].tobytes()
    for name in ("x", "y"):
        (folder / f"{name}.safetensors").unlink()
    return output


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_messages_over_grpcs_default_limit(processes, tmp_path, dtype):
    """7 and 14 MiB both ways, with the default settings of both SDKs."""
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=2, hidden=7168, intermediate=2)
    address = processes.serve(model, 2).address()
    x = tokens(7168, 512).astype(dtype)
    with expertmesh.Client(address) as client:
        result = client.forward(0, x)
        for row in (0, 300, 511):
            assert client.forward(0, x[row : row + 1]).output.tobytes() == result.output[row].tobytes()
    assert command_output(processes, address, x, tmp_path) == result.output.tobytes()


def test_the_largest_message_and_one_more(processes, tmp_path):
    """At the router's limit, one row over it, and ten times it: taken, refused with the limit in the text; the SDK,
    which knows the limit, splits what is over it."""
    limit = 1 << 20
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=2, hidden=64, intermediate=4)
    router = processes.router(model, "--max-message-bytes", limit)
    address = router.address()
    processes.server(model, address, "0/1", "--max-message-bytes", limit)
    processes.wait_serving(address)
    x = tokens(64, 10 * limit // 256)
    row_bytes, reply_bytes = 64 * 4, 64 * 4 + 2 * (4 + 4)
    raw = stub(address)
    most = (limit - 200) // reply_bytes
    assert raw.Forward(request(0, x[:most]), timeout=20).output.shape == [most, 64]
    for count in (limit // reply_bytes + 1, limit // row_bytes + 1, len(x)):  # too large is the reply, or the request
        with pytest.raises(grpc.RpcError) as caught:
            raw.Forward(request(0, x[:count]), timeout=20)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(limit) in caught.value.details()
    with expertmesh.Client(address, max_message_bytes=limit) as client:
        whole = client.forward(0, x)
        for start in (0, limit // row_bytes - 50, len(x) - 100):
            part = client.forward(0, x[start : start + 100])
            assert part.output.tobytes() == whole.output[start : start + 100].tobytes()
    assert router.running()


# --- full ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_more_than_2_to_the_31_elements(processes, tmp_path):
    """T * K * D = 40,000 * 8 * 8,192: 655 MB each way, in parts, with bounded memory in router and servers."""
    model = write_checkpoint(tmp_path / "model", experts=8, top_k=8, hidden=8192, intermediate=4)
    router, servers, address = processes.by_hand(model, 2)
    rows = tokens(8192, 1000).astype(ml_dtypes.bfloat16)
    x = np.tile(rows, (40, 1))
    x[-1] = rows[17] * ml_dtypes.bfloat16(2)
    with expertmesh.Client(address, timeout=600) as client:
        start = time.monotonic()
        whole = client.forward(0, x)
        print(f"{len(x)} tokens in {time.monotonic() - start:.1f} s, peak {peak_memory(router) / MIB:.0f} MiB")
        for row in (0, 32_767, 32_768, 39_998, 39_999):  # 32,768 * 8 * 8,192 is 2^31
            alone = client.forward(0, x[row : row + 1])
            assert alone.output.tobytes() == whole.output[row].tobytes()
            assert alone.topk_ids.tobytes() == whole.topk_ids[row].tobytes()
    assert max(map(peak_memory, [router, *servers])) < PEAK
    assert command_output(processes, address, x, tmp_path, 600) == whole.output.tobytes()
    assert all(process.stop() == 0 for process in [router, *servers])


@pytest.mark.full
def test_more_than_2_to_the_31_bytes(processes, tmp_path):
    """More than one protobuf message can be."""
    model = write_checkpoint(tmp_path / "model", experts=2, top_k=1, hidden=8192, intermediate=2)
    router, servers, address = processes.by_hand(model, 1)
    rows = tokens(8192, 1000).astype(ml_dtypes.bfloat16)
    x = np.tile(rows, (132, 1))
    assert x.nbytes > 1 << 31
    x[-1] = rows[17] * ml_dtypes.bfloat16(2)
    with expertmesh.Client(address, timeout=600) as client:
        whole = client.forward(0, x)
        for row in (0, 131_071, 131_072, 131_999):  # 131,072 * 8,192 * 2 is 2^31
            assert client.forward(0, x[row : row + 1]).output.tobytes() == whole.output[row].tobytes()
        assert max(map(peak_memory, [router, *servers])) < PEAK
        assert command_output(processes, address, x, tmp_path, 600) == whole.output.tobytes()
        del whole
        # One message of it is refused, wherever it is built, and nobody is harmed.
        with expertmesh.Client(address, timeout=60, max_message_bytes=(1 << 31) - 1) as bold:
            with pytest.raises(expertmesh.Error) as caught:
                bold.forward(0, x[:65_000])  # 1 GB
            assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(64 * MIB) in caught.value.message
        assert bits(client.forward(0, x[:10])) == bits(client.forward(0, x[:10]))
    assert all(process.stop() == 0 for process in [router, *servers])
