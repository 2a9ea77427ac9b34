"""Health and reflection, as any gRPC tool asks for them: router and expert servers answer."""

from __future__ import annotations

import socket

import grpc
import pytest
from expert_stream import ExpertStream
from models import SMALL, write_checkpoint
from processes import free_port, wait_until

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse.status
ROUTER = "expertmesh.v1.MoeService"
SERVER = "expertmesh.v1.ExpertService"


def health(address: str, service: str = "") -> bytes:
    """The encoded HealthCheckResponse; the request is one string field, number 1."""
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=10, wait_for_ready=True)


def reflection(address: str, request: bytes) -> bytes:
    """One encoded ServerReflectionResponse."""
    with grpc.insecure_channel(address) as channel:
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        return next(channel.stream_stream(method)(iter([request]), timeout=10, wait_for_ready=True))


def test_health_follows_the_cluster(processes):
    router = processes.router(SMALL).address()
    assert health(router) == health(router, ROUTER) == NOT_SERVING
    assert health(router, "expertmesh.v1.ClusterService") == SERVING
    server = processes.server(SMALL, router)
    assert health(server.address()) == health(server.address(), SERVER) == SERVING
    wait_until("the router serves", lambda: health(router) == health(router, ROUTER) == SERVING)
    server.kill()
    wait_until("the router does not", lambda: health(router) == health(router, ROUTER) == NOT_SERVING, 5)
    for service in ("nobody", SERVER):
        with pytest.raises(grpc.RpcError) as caught:
            health(router, service)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_server_that_loads_does_not_serve(processes, tmp_path):
    model = write_checkpoint(
        tmp_path / "model", experts=16, top_k=2, hidden=2048, intermediate=2048, layers=4, sparse=True
    )
    port = free_port()
    address = f"127.0.0.1:{port}"
    # 1.5 GiB to read, at the lowest priority: this test has to be faster.
    server = processes.server(model, "127.0.0.1:1", port=port, prefix=("nice", "-n", "19"))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until("it listens", listens)
    with ExpertStream(address) as stream:
        answers = [health(address), stream.call.code(), stream.call.details()]
    assert "serving on" not in server.log.read_text(), "loaded too fast for this test"
    assert answers == [NOT_SERVING, grpc.StatusCode.UNAVAILABLE, "the experts are still being loaded"]
    assert server.running()


def test_reflection(processes):
    _, [server], router = processes.by_hand(SMALL, 1)
    everywhere = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    own = {router: {ROUTER, "expertmesh.v1.ClusterService"}, server.address(): {SERVER}}
    for address, services in own.items():
        listed = reflection(address, b"\x3a\x01*")  # list_services = 7
        for name in everywhere | services:
            assert name.encode() in listed
        for name in services:
            symbol = b"\x22" + bytes([len(name)]) + name.encode()  # file_containing_symbol = 4
            described = reflection(address, symbol)
            assert b"proto3" in described and name.rpartition(".")[2].encode() in described
