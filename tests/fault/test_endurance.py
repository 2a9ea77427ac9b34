"""What shows only after a while: leaks, and connections that are given up."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import expertmesh
import pytest
from models import OLMOE, bits, read_safetensors, tokens, write_checkpoint, write_hidden_states
from processes import cpu_seconds, open_files, resident
from proxy import Link

MIB = 1 << 20
CALLS = 20_000
CLIENTS = 8


@pytest.mark.full
def test_twenty_thousand_calls(processes):
    """Of 1 to 200 tokens, from eight clients that connect anew now and then. Memory and files stay what they were
    after a fifth of them."""
    router, servers, address = processes.by_hand(OLMOE, 2)
    inputs = [(layer, tokens(128, count, count)) for layer, count in enumerate([1, 1, 2, 7, 16, 33, 64, 200], -4)]
    inputs = [(layer % 4, x) for layer, x in inputs]
    with expertmesh.Client(address) as client:
        expected = [bits(client.forward(layer, x)) for layer, x in inputs]
    daemons = [router, *servers]

    def one_client(seed: int, calls: int) -> None:
        choose = random.Random(seed)
        while calls:
            with expertmesh.Client(address, timeout=60) as client:
                for _ in range(min(250, calls)):
                    i = choose.randrange(len(inputs))
                    assert bits(client.forward(*inputs[i])) == expected[i]
                    calls -= 1

    def run(calls: int, seed: int) -> list[tuple[int, int]]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(one_client, seed + i, calls // CLIENTS) for i in range(CLIENTS)]:
                done.result()
        time.sleep(1)  # for connections that are being closed
        return [(resident(daemon), open_files(daemon)) for daemon in daemons]

    start = time.monotonic()
    warm = run(CALLS // 5, 0)
    end = run(CALLS - CALLS // 5, 100)
    print(f"{CALLS} calls in {time.monotonic() - start:.0f} s")
    for daemon, (memory, files), (memory_now, files_now) in zip(daemons, warm, end):
        print(f"{daemon.name}: {memory / MIB:.1f} -> {memory_now / MIB:.1f} MiB, {files} -> {files_now} files")
        assert memory_now - memory < 8 * MIB, daemon.name
        assert files_now <= files, daemon.name
    assert all(daemon.stop() == 0 for daemon in daemons)


@pytest.mark.full
def test_long_calls_and_idle_channels(processes, tmp_path):
    """A call of a minute from each SDK, beside a client that does nothing: each keeps its one connection, pings or
    not."""
    model = write_checkpoint(tmp_path / "model", experts=1, top_k=1, hidden=512, intermediate=16384)
    router = processes.router(model)
    address = router.address()
    server = processes.server(model, address, "0/1", "--engine", "for_loop")
    processes.wait_serving(address)
    x = tokens(512, 64)
    with Link().lead_to(address) as quiet, Link().lead_to(address) as python, Link().lead_to(address) as command:
        with expertmesh.Client(quiet.address, timeout=60) as idle, expertmesh.Client(python.address) as busy:
            start = cpu_seconds(server)
            part = idle.forward(0, x)
            repeats = int(35 / (cpu_seconds(server) - start)) + 1  # the two share the server's one thread
            long = x.repeat(repeats, axis=0)
            output = tmp_path / "y.safetensors"
            arguments = ["--router", command.address, "--layer", 0, "--timeout", 300, "--output", output]
            arguments += ["--input", write_hidden_states(tmp_path / "x.safetensors", long)]
            done = []
            second = threading.Thread(
                target=lambda: done.append(processes.cli("forward", *arguments, seconds=300))
            )
            start = time.monotonic()
            second.start()
            expected = part.output.repeat(repeats, axis=0).tobytes()
            assert busy.forward(0, long, timeout=300).output.tobytes() == expected
            second.join()
            seconds = time.monotonic() - start
            print(f"{len(long)} tokens twice in {seconds:.0f} s")
            assert seconds > 60, "computed too fast for this test"
            assert done[0].returncode == 0, done[0].stderr
            assert read_safetensors(output)["output"].tobytes() == expected
            assert bits(idle.forward(0, x)) == bits(part)
        assert [link.connections for link in (quiet, python, command)] == [1, 1, 1]
    assert router.stop() == 0 and server.stop() == 0
    log = router.log.read_text()
    assert "is gone" not in log.partition("stopping")[0]
