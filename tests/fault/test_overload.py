"""More than a cluster can take: refused with a hint when to try again, in bounded memory."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, message_factory
from models import reply_bits, request, stub, tokens, write_checkpoint
from processes import peak_memory, wait_until

MIB = 1 << 20


def google_rpc_status() -> type:
    """google.rpc.Status, which is not among the packages that these tests need."""
    file = descriptor_pb2.FileDescriptorProto(name="status.proto", package="google.rpc", syntax="proto3")
    file.dependency.append("google/protobuf/any.proto")
    message = file.message_type.add(name="Status")
    kind = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="code", number=1, type=kind.TYPE_INT32, label=kind.LABEL_OPTIONAL)
    message.field.add(name="message", number=2, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    message.field.add(
        name="details",
        number=3,
        type=kind.TYPE_MESSAGE,
        label=kind.LABEL_REPEATED,
        type_name=".google.protobuf.Any",
    )
    pool = descriptor_pool.DescriptorPool()
    any_file = descriptor_pb2.FileDescriptorProto()
    any_pb2.DESCRIPTOR.CopyToProto(any_file)
    pool.Add(any_file)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("google.rpc.Status"))


STATUS = google_rpc_status()


def assert_retry_later(error: grpc.RpcError) -> None:
    """RESOURCE_EXHAUSTED, with the hint in the text and where standard clients look for it."""
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
    assert "retry later (after 100 ms)" in error.details()
    [encoded] = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    status = STATUS.FromString(encoded)
    assert status.code == error.code().value[0] and status.message == error.details()
    [detail] = status.details
    assert detail.type_url == "type.googleapis.com/google.rpc.RetryInfo"
    # RetryInfo has one field, number 1, a Duration.
    assert detail.value[:1] == b"\x0a" and detail.value[1] == len(detail.value) - 2
    delay = duration_pb2.Duration.FromString(detail.value[2:])
    assert delay.ToTimedelta().total_seconds() == 0.1


def refusal(call: grpc.Future) -> grpc.RpcError | None:
    return None if call.code() == grpc.StatusCode.OK else call


def test_a_full_router(processes, tmp_path):
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=2)
    address = processes.router(model, "--queue", 3).address()
    x = tokens(16, 2)
    # As a client that would retry whatever it is told to.
    client = stub(address)
    waiting = [client.Forward.future(request(0, x), timeout=60) for _ in range(3)]

    def refused() -> grpc.Future | None:
        """A fourth call that found the three there."""
        call = client.Forward.future(request(0, x), timeout=0.5)
        code = call.code()
        for i in range(3):
            if waiting[i].done():  # the fourth, or the one before it, was there first
                waiting[i] = client.Forward.future(request(0, x), timeout=60)
                code = None
        return call if code == grpc.StatusCode.RESOURCE_EXHAUSTED else None

    error = wait_until("the router is full", refused)
    assert_retry_later(error)
    assert "3 requests are under way in the router" in error.details()
    waiting[0].cancel()  # gives its place up
    wait_until(
        "there is room",
        lambda: client.Forward.future(request(0, x), timeout=0.5).code()
        in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE),
    )
    processes.server(model, address)
    processes.wait_serving(address)
    expected = reply_bits(client.Forward(request(0, x), timeout=60))
    assert [reply_bits(call.result()) for call in waiting[1:]] == [expected] * 2


def test_a_full_server(processes, tmp_path):
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=2, hidden=512, intermediate=512)
    address = processes.router(model, "--rounds-per-layer", 0).address()
    processes.server(model, address, "0/1", "--engine", "for_loop", "--queue", 2)
    processes.wait_serving(address)
    client = stub(address)
    x = tokens(512, 50)
    expected = reply_bits(client.Forward(request(0, x), timeout=60))
    calls = [client.Forward.future(request(0, x), timeout=60) for _ in range(30)]
    refused = [call for call in calls if refusal(call)]
    assert 0 < len(refused) < 30
    for call in refused:
        assert_retry_later(call)
        assert "the server's queue of 2 slices is full" in call.details()
    assert all(reply_bits(call.result()) == expected for call in calls if call not in refused)


READER = """
import sys
sys.path[:0] = {path}
from models import request, stub, tokens
client = stub({address!r})
calls = [client.Forward.future(request(0, tokens(256, 1024)), timeout=120) for _ in range(200)]
for call in calls:
    call.code()
"""


def test_readers_that_do_not_read(processes, tmp_path):
    """What is computed for them waits in the router, and counts there until they have taken it."""
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=1, hidden=256, intermediate=2)
    router = processes.router(model, "--queue-bytes", 20 * MIB)
    address = router.address()
    client = stub(address)
    x = tokens(256, 1)
    script = READER.format(path=[str(Path(__file__).parent), *sys.path], address=address)
    reader = processes.start(sys.executable, "-c", script, name="reader")

    def full() -> grpc.RpcError | None:
        call = client.Forward.future(request(0, x), timeout=0.3)
        return call if call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED else None

    wait_until("the router is full", full)
    reader.signal(signal.SIGSTOP)
    before = peak_memory(router)
    processes.server(model, address)
    processes.wait_serving(address)
    time.sleep(1)
    for _ in range(10):
        assert_retry_later(wait_until("it is still full", full, 1))
    # 20 MiB of requests, twice (as they came, and aligned), and as many bytes of answers.
    assert peak_memory(router) - before < 100 * MIB
    reader.kill()
    wait_until("there is room", lambda: client.Forward.future(request(0, x), timeout=5).code() == grpc.StatusCode.OK)
    assert np.isfinite(np.frombuffer(client.Forward(request(0, x), timeout=20).output.data, np.float32)).all()
