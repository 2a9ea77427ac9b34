"""Slow links, addresses that lead nowhere, and addresses that lead to somebody else."""

from __future__ import annotations

import re
import time
from pathlib import Path

import expertmesh
import grpc
import pytest
from models import SMALL, bits, forward, tokens, write_checkpoint
from processes import Process, Processes, free_port, wait_until
from proxy import SlowLink

HIDDEN = 12
LINK_SECONDS = 0.3
# Fails to resolve without any name server being asked: a label has at most 63 characters.
NO_NAME = "x" * 64 + ".invalid:7070"


def log_lines(process: Process, words: str) -> list[str]:
    return [line for line in process.log.read_text().splitlines() if re.search(words, line)]


def wait_logged(process: Process, words: str) -> str:
    """The first line of its log that has them."""
    return wait_until(f"{process.name} says {words!r}", lambda: log_lines(process, words))[0]


def test_a_slow_link(processes):
    """To connect takes several times what one direction takes."""
    x = tokens(HIDDEN, 20)
    _, _, direct = processes.by_hand(SMALL, 1)
    expected = bits(forward(direct, 0, x))
    router = processes.router(SMALL).address()
    with SlowLink(LINK_SECONDS).lead_to(router) as to_router, SlowLink(LINK_SECONDS) as to_server:
        server = processes.server(SMALL, to_router.address, "0/1", "--advertise", to_server.address)
        to_server.lead_to(server.address())
        processes.wait_serving(router)
        assert processes.status(router)["servers"][0]["address"] == to_server.address
        assert to_router.connections and to_server.connections
        assert bits(forward(to_router.address, 0, x, timeout=20)) == expected
        assert processes.healthy(to_router.address)
        assert processes.status(to_router.address)["serving"]
        assert server.running() and not log_lines(server, " error |lost")


def impostor(processes: Processes, router: str, case: str, tmp_path: Path) -> Process:
    """A server that tells `router` the address of a server that is not the one it says."""
    nobody = "127.0.0.1:1"
    if case == "another model":
        # Equal shapes, so that nothing but the numbers would be wrong.
        model = write_checkpoint(tmp_path / "other", experts=4, top_k=2, seed=1)
        there = processes.server(model, nobody)
    else:
        there = processes.server(tmp_path / "model", nobody, "0/1", "--name", "somebody")
    return processes.server(tmp_path / "model", router, "0/1", "--advertise", there.address())


@pytest.mark.parametrize("case", ["another model", "another name"])
def test_a_server_that_gives_the_address_of_another(processes, tmp_path, case):
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=2)
    router = processes.router(model, "--startup-grace", 0.1)
    address = router.address()
    server = impostor(processes, address, case, tmp_path)
    reason = "expertmesh-model-fingerprint" if case == "another model" else 'expected "server-0", got "somebody"'
    assert "another server answers there" in wait_logged(router, reason)
    assert "another server answers there" in wait_logged(server, reason)
    assert not processes.healthy(address)
    assert processes.states(address)["server-0"] != "serving"
    with pytest.raises(expertmesh.Error) as caught:
        forward(address, 0, tokens(16, 8), timeout=20)
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE, caught.value
    assert not log_lines(router, "is serving")
    # The honest one takes its place.
    assert server.stop() == 0
    wait_until("it is gone", lambda: processes.states(address)["server-0"] == "down")
    processes.server(model, address)
    processes.wait_serving(address)
    assert forward(address, 0, tokens(16, 8)).output.shape == (8, 16)


def test_an_address_that_nobody_answers(processes):
    router = processes.router(SMALL)
    nowhere = f"127.0.0.1:{free_port()}"
    server = processes.server(SMALL, router.address(), "0/1", "--advertise", nowhere)
    first = wait_logged(server, f"the router has no connection to {nowhere}: .")
    assert "refused" in first.lower()
    wait_logged(router, f"the router has no connection to {nowhere}: .*refused")
    start = time.monotonic()
    wait_until("3 s", lambda: time.monotonic() - start > 3)
    # It has tried again and again, ever more rarely, and has said the reason, always the same, once.
    assert 2 <= len(log_lines(server, "registered with")) < 8
    assert log_lines(server, "has no connection") == [first]
    assert not processes.healthy(router.address())
    assert server.stop(5) == 0


@pytest.mark.parametrize("router", [NO_NAME, "127.0.0.1:1"], ids=["no name", "nobody"])
def test_a_router_that_is_not_there_is_waited_for(processes, router):
    server = processes.server(SMALL, router)
    server.address()
    reason = wait_logged(server, f"waiting for the router at {router}: .").partition(router)[2]
    assert ("resol" if router == NO_NAME else "refused") in reason.lower()
    assert server.running()
    assert server.stop(5) == 0


@pytest.mark.parametrize("given", ["nonsense", "127.0.0.1:", "127.0.0.1:99999", "::1:7070"])
def test_a_server_with_what_is_no_address(processes, given):
    for option, server in {
        "router": processes.server(SMALL, given),
        "advertise": processes.server(SMALL, "127.0.0.1:1", "0/1", "--advertise", given),
    }.items():
        assert server.wait() == 1
        assert f'{option}: expected HOST:PORT' in server.tail() and f'"{given}"' in server.tail()


def test_a_server_that_listens_everywhere_says_where_it_is(processes):
    command = [processes.binaries / "expertmesh-expert-server", "--model", SMALL, "--listen", "0.0.0.0:0"]
    silent = processes.start(*command, name="silent")
    assert silent.wait() == 1
    assert "0.0.0.0:0" in silent.tail() and "--advertise HOST:PORT" in silent.tail()
    router = processes.router(SMALL).address()
    port = free_port()
    command[-1] = f"0.0.0.0:{port}"
    processes.start(*command, "--router", router, "--advertise", f"127.0.0.1:{port}", name="server")
    processes.wait_serving(router)
    assert processes.status(router)["servers"][0]["address"] == f"127.0.0.1:{port}"
