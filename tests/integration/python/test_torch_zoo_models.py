"""The tiny models of all families, as they are written to files, against the families' formulas in float64.

No cluster: what is wrong here is a file or a formula of the tests.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zoo import FAMILIES, Files, dense_mlps, make_model, moe_blocks, rows, run, save
from zoo_formulas import FORMULAS

BOUND = 1e-5
MIN_GAP = 1e-5
CASES = [(family, *shape) for family in FAMILIES for shape in FAMILIES[family].shapes]


def relative(given: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(given - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("family", "experts", "top_k"), CASES)
def test_blocks(tmp_path, family, experts, top_k):
    model = make_model(family, "f32", experts, top_k)
    files = Files(family, save(model, tmp_path / "model", family, "released"))
    layers = moe_blocks(model)
    assert layers
    for index, layer in layers.items():
        x = rows(40, index)
        expected = files.block(index, x)
        output, ids = run(layer, x)
        clear = expected.gaps > MIN_GAP
        assert (~clear).sum() <= 1
        assert relative(output.numpy()[clear], expected.output[clear]) <= BOUND, index
        assert ids.shape == expected.ids.shape
        assert np.array_equal(np.sort(ids.numpy())[clear], np.sort(expected.ids)[clear])
    for index, mlp in dense_mlps(model).items():
        if FORMULAS[family].dense is not None:
            x = rows(5, index)
            with torch.no_grad():
                assert relative(mlp(x[None])[0].numpy(), files.dense(index, x)) <= BOUND, index


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_shows_in_the_output(tmp_path, family):
    """What the formulas read from a file matters: biases and norms are not zeros or ones by accident."""
    model = make_model(family, "f32", *FAMILIES[family].shapes[0])
    files = Files(family, save(model, tmp_path / "model", family, "released"))
    index = next(iter(moe_blocks(model)))
    x = rows(60, 0)
    expected = files.block(index, x)
    formula = FORMULAS[family]
    names = [formula.logits_bias, formula.selection_bias, formula.per_expert_scale]
    names += [formula.router_norm, formula.expert_norm, formula.shared_gate, formula.router]
    for name in filter(None, names):
        full = formula.block.format(index) + name
        tensor = files.tensors[full]
        files.tensors[full] = np.zeros_like(tensor) if "norm" not in name else np.ones_like(tensor)
        changed = files.block(index, x).output
        files.tensors[full] = tensor
        assert relative(changed, expected.output) > 1e-3, name
