"""Experts that get no token of a round, and rounds after others have left their rows in memory."""

from __future__ import annotations

import expertmesh
import numpy as np
import pytest
from fake_router import checkpoint_layers
from models import bits, tokens, write_checkpoint

HIDDEN = 32
# Tokens of each expert.
COUNTS = {
    "every other": [0, 5, 0, 3],
    "the first": [5, 0, 0, 0],
    "the last": [0, 0, 0, 5],
    "one each": [1, 1, 1, 1],
    "none": [0, 0, 0, 0],
    "eight of 2048": [299, 254, 158, 278, 167, 343, 263, 286],
}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", COUNTS)
def test_counts(processes, tmp_path, name, servers):
    counts = COUNTS[name]
    model = write_checkpoint(
        tmp_path / "model", experts=len(counts), top_k=1, hidden=HIDDEN, intermediate=HIDDEN, seed=3
    )
    block = checkpoint_layers(model)[0]
    pool = tokens(HIDDEN, 8000)
    expert = np.argmax(pool @ block.gate.T, axis=1)
    chosen = [np.flatnonzero(expert == e)[:count] for e, count in enumerate(counts)]
    assert [len(rows) for rows in chosen] == counts
    x = pool[np.random.default_rng(0).permutation(np.concatenate(chosen).astype(int))]
    output, ids, _, _ = block(x)
    with expertmesh.Client(processes.serve(model, servers).address()) as client:
        client.forward(0, 1e30 * pool[:3000])  # leaves its large rows in the memory that the next ones use
        first = client.forward(0, x)
        assert (first.topk_ids == ids).all()
        assert np.bincount(first.topk_ids.ravel(), minlength=len(counts)).tolist() == counts
        assert np.linalg.norm(first.output - output) <= 1e-5 * np.linalg.norm(output)
        for _ in range(3):
            client.forward(0, 1e30 * pool[:3000])
            assert bits(client.forward(0, x)) == bits(first)
        alone = [client.forward(0, x[i : i + 1]).output for i in range(0, len(x), 100)]
        assert all(row.tobytes() == first.output[100 * i].tobytes() for i, row in enumerate(alone))
