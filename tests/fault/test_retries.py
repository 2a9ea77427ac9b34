"""What a client sends again and what it does not: both SDKs do the same."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expertmesh
import grpc
import numpy as np
import pytest
from fake_router import FakeRouter, random_layer
from models import (
    bits,
    forward,
    read_safetensors,
    request,
    stub,
    tokens,
    write_checkpoint,
    write_hidden_states,
)
from processes import Processes
from proxy import BreakingLink

HIDDEN = 2048
ROWS = 2560  # of 8 KiB: 20 MiB, 80 times what gRPC keeps for a retry by default
MIB = 1 << 20
SDKS = ["python", "command"]

# What a call of an SDK comes to: the bits, or what it says (with the name of the code, where it tells it).
Outcome = tuple[bytes, bytes, bytes] | str


def call(sdk: str, processes: Processes, address: str, x: np.ndarray, timeout: float = 30) -> Outcome:
    if sdk == "python":
        try:
            return bits(forward(address, 0, x, timeout=timeout))
        except expertmesh.Error as error:
            return str(error)
    source, target = processes.folder / "x.safetensors", processes.folder / "y.safetensors"
    write_hidden_states(source, x)
    done = processes.cli(
        "forward", "--router", address, "--layer", 0, "--input", source, "--output", target, "--timeout", timeout
    )
    return done.stderr if done.returncode else command_bits(target)


def command_bits(file: Path) -> tuple[bytes, bytes, bytes]:
    tensors = read_safetensors(file)
    return tuple(tensors[name].tobytes() for name in ("output", "topk_ids", "topk_weights"))


@pytest.fixture(scope="module")
def address(shared_processes, tmp_path_factory) -> str:
    model = tmp_path_factory.mktemp("wide") / "model"
    write_checkpoint(model, experts=2, top_k=1, hidden=HIDDEN, intermediate=4)
    return shared_processes.serve(model, 1).address()


@pytest.fixture(scope="module")
def expected(address) -> tuple[np.ndarray, Outcome]:
    x = tokens(HIDDEN, ROWS)
    return x, bits(forward(address, 0, x))


@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize("times, after", [(1, 0), (1, 10 * MIB), (2, 19 * MIB)])
def test_a_connection_that_breaks_before_the_reply(processes, address, expected, sdk, times, after):
    x, result = expected
    with BreakingLink(times, after).lead_to(address) as link:
        assert call(sdk, processes, link.address, x) == result
        assert link.connections == times + 1


@pytest.mark.parametrize("sdk", SDKS)
def test_a_connection_that_always_breaks(processes, address, expected, sdk):
    """Three attempts, and no more."""
    x, _ = expected
    with BreakingLink(10**6, 10 * MIB).lead_to(address) as link:
        start = time.monotonic()
        outcome = call(sdk, processes, link.address, x)
        assert isinstance(outcome, str)
        assert sdk == "command" or outcome.startswith("UNAVAILABLE")
        assert time.monotonic() - start < 10
        assert link.connections <= 4  # the last attempt's failure may have connected anew


@pytest.mark.parametrize("sdk", SDKS)
def test_a_connection_that_breaks_in_the_reply(processes, address, expected, sdk):
    """gRPC repeats nothing of which it has seen a reply: an error at once, and the next call works."""
    x, result = expected
    with BreakingLink(1, 10 * MIB, from_client=False).lead_to(address) as link:
        start = time.monotonic()
        outcome = call(sdk, processes, link.address, x)
        assert isinstance(outcome, str)
        assert sdk == "command" or outcome.startswith("UNAVAILABLE"), outcome
        assert time.monotonic() - start < 10
        assert link.connections == 1
        assert call(sdk, processes, link.address, x) == result
        assert link.connections == 2


@pytest.mark.parametrize("sdk", SDKS)
def test_a_router_that_is_started_again(processes, tmp_path, sdk):
    """Killed in mid-call: the call waits for the next one."""
    model = write_checkpoint(tmp_path / "model", experts=8, top_k=2)
    router, [server], address = processes.by_hand(model, 1)
    x = tokens(16, 400)
    result = call(sdk, processes, address, x)
    server.signal(signal.SIGSTOP)  # so that the call is under way for as long as it takes
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(call, sdk, processes, address, x)
        time.sleep(0.5)
        router.kill()
        server.signal(signal.SIGCONT)
        processes.router(model, port=int(address.rpartition(":")[2]))
        assert outcome.result() == result


def refuse(code: grpc.StatusCode, pushback: str | None) -> Callable[[grpc.ServicerContext], None]:
    def before(context: grpc.ServicerContext) -> None:
        if pushback is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback),))
        context.abort(code, "not here, not now")

    return before


@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize(
    "code, pushback, attempts",
    [
        (grpc.StatusCode.UNAVAILABLE, "-1", 1),  # what a router says whose experts are missing
        (grpc.StatusCode.UNAVAILABLE, None, 3),  # one that is stopping
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None, 1),
        (grpc.StatusCode.INVALID_ARGUMENT, None, 1),
        (grpc.StatusCode.INTERNAL, None, 1),
    ],
)
def test_what_a_router_refuses(processes, sdk, code, pushback, attempts):
    layers = {0: random_layer(0)}
    with FakeRouter(layers, before=refuse(code, pushback)) as router:
        outcome = call(sdk, processes, router.address, tokens(24, 3))
    assert "not here, not now" in outcome
    assert len(router.requests) == attempts


def test_missing_experts_are_not_asked_for_again(processes, tmp_path):
    """The router says so to every client's gRPC."""
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=2)
    address = processes.router(model, "--startup-grace", 0.1).address()
    time.sleep(0.2)
    with pytest.raises(grpc.RpcError) as caught:
        stub(address).Forward(request(0, tokens(16, 3)), timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert ("grpc-retry-pushback-ms", "-1") in caught.value.trailing_metadata()
    for sdk in SDKS:
        assert "no live server holds experts" in call(sdk, processes, address, tokens(16, 3))
