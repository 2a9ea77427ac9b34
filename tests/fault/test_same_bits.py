"""Placement, repetition and ties: the same request gives the same bytes."""

from __future__ import annotations

import json

import expertmesh
import numpy as np
import pytest
from fake_router import checkpoint_layers
from models import OLMOE, bits, forward, tokens, write_checkpoint

LAYOUTS = {10: [3, 2, 3, 2], 3: [1, 1, 1, 0]}  # experts: as many as each of four servers may hold, in any order


@pytest.mark.parametrize("experts", LAYOUTS)
def test_experts_not_divisible_by_servers(processes, tmp_path, experts):
    model = write_checkpoint(tmp_path / "model", experts=experts, top_k=2, layers=2)
    x = tokens(16, 77)
    results = {}
    for servers in (1, 4):
        serve = processes.serve(model, servers)
        address = serve.address()
        results[servers] = [forward(address, layer, x) for layer in range(2)]
        status = processes.status(address)
        assert status["serving"] and len(status["servers"]) == servers
        plan = json.loads(processes.cli("inspect", model, "--servers", servers, "--json").stdout)
        assert [s["experts"] for s in plan["servers"]] == [s["experts"] for s in status["servers"]]
        assert sum(s["bytes"] for s in plan["servers"]) == 2 * experts * plan["layers"][0]["expert_bytes"]
        for layer in ("0", "1"):
            held = [s["experts"].get(layer, []) for s in status["servers"]]
            assert sum(held, []) == list(range(experts))  # contiguous, ascending by server
            if servers == 4:
                assert sorted(map(len, held)) == sorted(LAYOUTS[experts])
        assert serve.stop() == 0
    assert [bits(result) for result in results[1]] == [bits(result) for result in results[4]]
    for layer, block in checkpoint_layers(model).items():
        output, ids, _, _ = block(x)
        assert (results[4][layer].topk_ids == ids).all()
        assert np.linalg.norm(results[4][layer].output - output) <= 1e-5 * np.linalg.norm(output)


@pytest.mark.parametrize("servers", [1, 4])
def test_ties_go_to_the_lower_id(processes, tmp_path, servers):
    model = write_checkpoint(tmp_path / "model", experts=8, top_k=3, zero_gates=True)
    with expertmesh.Client(processes.serve(model, servers).address()) as client:
        for count in (1, 257):
            x = tokens(16, count)
            first = client.forward(0, x)
            assert (first.topk_ids == [0, 1, 2]).all()
            assert (np.abs(first.topk_weights - 1 / 3) < 1e-7).all()
            for _ in range(20):
                assert bits(client.forward(0, x)) == bits(first)


def test_forty_repeats(processes):
    x = tokens(128, 64)
    alone: list[set[bytes]] = []
    for servers in (1, 4):
        with expertmesh.Client(processes.serve(OLMOE, servers).address()) as client:
            distinct = {bits(client.forward(3, x)) for _ in range(40)}
            assert len(distinct) == 1
            rows = np.concatenate([client.forward(3, x[i : i + 1]).output for i in range(len(x))])
            assert rows.tobytes() == next(iter(distinct))[0]
            alone.append(distinct)
    assert alone[0] == alone[1]
