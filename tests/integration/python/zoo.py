"""transformers' own modules of all families, and the tensors of the files that are served."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expertmesh
import ml_dtypes
import numpy as np
import torch
from checks import relative
from safetensors.torch import load_file
from torch import nn
from zoo_formulas import FORMULAS, Result, block_output, dense_output

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "golden"))
from make_quantised_models import MODELS, save_quantised  # noqa: E402
from make_zoo_models import DTYPES, FAMILIES, HIDDEN, make_model, save  # noqa: E402

__all__ = [
    "DTYPES",
    "FAMILIES",
    "Files",
    "MODELS",
    "check_blocks",
    "dense_mlps",
    "make_model",
    "moe_blocks",
    "rows",
    "run",
    "save",
    "save_quantised",
]

# Relative Frobenius error of a block's output by the dtype of the request.
BOUNDS = {np.float32: 1e-5, ml_dtypes.bfloat16: 1e-2, np.float16: 2e-3}
MIN_GAP = 1e-5
ROWS = 100

torch.set_num_threads(1)  # the tensors are too small for more
BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer")


def rows(count: int, seed: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


def _layers(model: nn.Module) -> nn.ModuleList:
    if hasattr(model, "transformer"):
        return model.transformer.blocks
    return getattr(model.model, "language_model", model.model).layers


def _block(layer: nn.Module) -> nn.Module:
    if hasattr(layer, "experts"):
        return layer
    return next(getattr(layer, name) for name in BLOCKS if hasattr(layer, name))


def moe_blocks(model: nn.Module) -> dict[int, nn.Module]:
    """The layers of a local model that have an MoE block, by index."""
    return {i: layer for i, layer in enumerate(_layers(model)) if hasattr(_block(layer), "experts")}


def dense_mlps(model: nn.Module) -> dict[int, nn.Module]:
    """The MLPs of layers without experts, by index."""
    blocks = {i: _block(layer) for i, layer in enumerate(_layers(model))}
    mlps = {i: block for i, block in blocks.items() if not hasattr(block, "experts")}
    return {i: block for i, block in mlps.items() if "MLP" in type(block).__name__}


@torch.no_grad()
def run(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, ids) of a layer's MoE block, with the shared experts that some families have beside it."""
    block = _block(layer)
    if block is layer:  # the experts see a norm of what the router sees
        _, weights, ids = layer.router(x)
        return layer.experts(layer.pre_feedforward_layernorm_2(x), ids, weights), ids
    router = block.gate if hasattr(block, "gate") else block.router
    caught: list[Any] = []
    hook = router.register_forward_hook(lambda module, arguments, output: caught.append(output))
    output = block(x[None])
    hook.remove()
    output = (output[0] if isinstance(output, tuple) else output).reshape(x.shape)
    if getattr(layer, "shared_mlp", None) is not None:
        output = output + layer.shared_mlp(x)
    if isinstance(caught[0], torch.Tensor):
        return output, block.route_tokens_to_experts(caught[0])[1]
    if len(caught[0]) == 2:  # the weights of all experts, 0 where not chosen
        return output, caught[0][0].topk(block.top_k).indices
    return output, caught[0][2]


@dataclass
class Files:
    """A released checkpoint in float64."""

    family: str
    folder: Path

    def __post_init__(self) -> None:
        config = json.loads((self.folder / "config.json").read_text())
        self.config = config.get("text_config", config)
        tensors = load_file(self.folder / "model.safetensors")
        self.tensors = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def block(self, layer: int, x: torch.Tensor) -> Result:
        return block_output(FORMULAS[self.family], self.config, self.tensors, layer, x.double().numpy())

    def dense(self, layer: int, x: torch.Tensor) -> np.ndarray:
        return dense_output(FORMULAS[self.family], self.config, self.tensors, layer, x.double().numpy())


def check_blocks(client: expertmesh.Client, model: nn.Module, files: Files) -> None:
    """Every MoE block and dense MLP that is served, for requests in every dtype, against transformers' own.

    model: in fp32. files: say for which tokens the choice of experts is clear.
    """
    served = {layer.layer: layer for layer in client.model().layers}
    blocks, mlps = moe_blocks(model), dense_mlps(model)
    assert {i for i, layer in served.items() if layer.kind == "MOE"} == blocks.keys()
    assert {i for i, layer in served.items() if layer.kind == "DENSE"} == mlps.keys()
    for index in served:
        x = rows(ROWS, index, served[index].hidden_size)
        for dtype, bound in BOUNDS.items():
            given = torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))
            result = client.forward(index, given.numpy().astype(dtype))
            output = torch.from_numpy(result.output.astype(np.float32))
            if index in mlps:
                with torch.no_grad():
                    assert relative(output, mlps[index](given[None])[0]) <= bound, (index, dtype)
                continue
            expected, ids = run(blocks[index], given)
            clear = torch.from_numpy(files.block(index, given).gaps > MIN_GAP)
            assert (~clear).sum() <= 0.01 * ROWS
            chosen = torch.from_numpy(result.topk_ids).long().sort().values
            assert torch.equal(chosen[clear], ids.sort().values[clear]), (index, dtype)
            error = relative(output[clear], expected[clear])
            assert error <= bound, (index, dtype, error)
