"""Flags that cannot work are refused at the start, with a text that says what would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from models import SMALL, bits, forward, tokens

NO_NAME = "x" * 64 + ".invalid:7070"  # no label of a name may be so long: no name server is asked
PROGRAMS = ["expertmesh-router", "expertmesh-expert-server"]
LISTEN = ["127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:", "127.0.0.1:abc", "127.0.0.1", ":7070", "::1:0", ""]


def refused(processes, program: str, *options: object) -> str:
    """What it says when it ends, which it does at once."""
    process = processes.start(processes.binaries / program, "--model", SMALL, *options, name=program)
    assert process.wait() not in (0, -6, -11)
    assert "listening" not in process.output.read_text()
    return process.tail()


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_address_to_listen_on(processes, program):
    for listen in LISTEN:
        text = refused(processes, program, "--listen", listen)
        assert "listen: expected HOST:PORT" in text and f'"{listen}"' in text


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_size_of_a_queue(processes, program):
    for queue in ("0", "-1", "many", str(1 << 40)):
        text = refused(processes, program, "--listen", "127.0.0.1:0", "--queue", queue)
        assert "--queue" in text and queue in text


def test_no_number_of_bytes(processes):
    for given in ("-1", "many"):
        text = refused(processes, "expertmesh-router", "--listen", "127.0.0.1:0", "--queue-bytes", given)
        assert "--queue-bytes" in text and given in text


@pytest.mark.parametrize("routers", ["nonsense", "127.0.0.1:99999", NO_NAME, f"127.0.0.1:1,{NO_NAME}"])
def test_health_of_a_router_that_cannot_exist(processes, routers):
    done = processes.cli("health", "--router", routers, "--timeout", 5)
    assert done.returncode == 2, done
    assert done.stdout == ""
    expected = "cannot resolve|resolution failed" if NO_NAME in routers else "expected HOST:PORT"
    assert re.search(expected, done.stderr)


def test_serve_on_ipv6(processes):
    """Where the machine has its loopback address; elsewhere it says that it has not."""
    addresses = Path("/proc/net/if_inet6")
    loopback = addresses.exists() and f"{1:032x}" in addresses.read_text()
    serve = processes.serve(SMALL, 1, "--host", "::1")
    if not loopback:
        assert serve.wait() == 1
        assert "cannot listen on [::1]:0" in serve.tail()
        return
    address = serve.address()
    assert address.startswith("[::1]:")
    [server] = processes.status(address)["servers"]
    assert server["address"].startswith("[::1]:")
    x = tokens(12, 9)
    four = processes.serve(SMALL, 1)
    assert bits(forward(address, 0, x)) == bits(forward(four.address(), 0, x))
    assert serve.stop() == 0


def test_serve_without_the_other_programs(processes, tmp_path):
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    shutil.copy2(processes.binaries / "expertmesh", alone)
    serve = processes.start(alone / "expertmesh", "serve", "--model", SMALL, "--port", 0)
    assert serve.wait() == 1
    assert f"{alone}/expertmesh-router" in serve.tail() and "No such file" in serve.tail()
    shutil.copy2(processes.binaries / "expertmesh-router", alone)
    serve = processes.start(alone / "expertmesh", "serve", "--model", SMALL, "--port", 0)
    assert serve.wait() == 1
    assert f"{alone}/expertmesh-expert-server" in serve.tail() and "No such file" in serve.tail()
