#!/usr/bin/env python3
"""One MoE layer in PyTorch and in ExpertMesh, taking turns on the same machine, weights and inputs.

    build/reference-venv/bin/python tests/bench/torch_layer.py --shape olmoe-1b-7b --tokens 1,8,64,512
    build/reference-venv/bin/python tests/bench/torch_layer.py --isa avx2      no AVX-512 on either side

ExpertMesh is a cluster that `expertmesh bench layer --worker` starts, timed by its C++ client (`expertmesh`)
and by the Python client (`expertmesh python`). PyTorch runs in this process, in inference mode, its weights
stacked beforehand:

    torch loop           a loop over the experts that have tokens
    torch grouped_mm     torch.nn.functional.grouped_mm over tokens sorted by expert
    transformers NAME    transformers' own block with that implementation of the experts

While one is timed the others are idle, and turns that other programs disturb are repeated. Every output is
compared with ExpertMesh's on the rows whose tokens went to the same experts: PyTorch's gate rounds its logits to the
dtype of the model, so near ties may go either way.
`expertmesh` is taken from EXPERTMESH_BIN (default build/release/bin).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BIN = Path(os.environ.get("EXPERTMESH_BIN", Path(__file__).resolve().parents[2] / "build" / "release" / "bin"))
WARM_UP = 5
# Between two that take turns: threads of either side may spin for a while before they sleep.
PAUSE_SECONDS = 0.03
# batched_mm copies the weights of every (token, slot) pair.
BATCHED_BYTES = 2 << 30
BOUNDS = {"bf16": 2e-2, "fp32": 1e-4}
SAME_EXPERTS = 0.7  # share of the rows, of 64 and more, that have to be comparable


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="olmoe-1b-7b", help="olmoe-1b-7b, qwen3-30b-a3b or DxFxExK")
    parser.add_argument("--dtype", default="bf16", choices=sorted(BOUNDS))
    parser.add_argument("--tokens", default="1,8,64,512,2048", help="numbers of tokens, separated by commas")
    parser.add_argument("--servers", type=int, default=2, help="expert servers")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of PyTorch")
    parser.add_argument("--isa", default="auto", help="of ExpertMesh; avx2 holds for PyTorch as well")
    parser.add_argument("--repetitions", type=int, default=7, help="turns of each")
    parser.add_argument("--keep-model", type=Path, help="folder for the weights, kept and used again")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


class Worker:
    """`expertmesh bench layer --worker`: a cluster with its C++ client."""

    def __init__(self, arguments: argparse.Namespace, model: Path) -> None:
        command = [BIN / "expertmesh", "bench", "layer", "--worker", "--keep-model", model]
        for name in ("shape", "dtype", "servers", "isa"):
            command += [f"--{name}", str(getattr(arguments, name))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.router = self._read().removeprefix("ready ")

    def run(self, tokens: int) -> float:
        """Milliseconds of one call."""
        return float(self._ask(f"run {tokens} 1"))

    def save(self, tokens: int, file: Path) -> None:
        """Writes hidden_states, output and topk_ids of one call."""
        self._ask(f"save {tokens} {file}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, line: str) -> str:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        line = self._process.stdout.readline().strip()
        if not line or line.startswith("error "):
            sys.exit(f"expertmesh bench layer --worker: {line or 'ended; its message is above'}")
        return line


def torch_layers(model: Path) -> tuple[dict[str, Callable], Callable, int]:
    """Name -> f(hidden_states) -> output; f(hidden_states) -> topk_ids; bytes of the experts of one token."""
    import torch
    import transformers
    from safetensors import safe_open
    from torch.nn import functional

    config = transformers.AutoConfig.from_pretrained(model)
    with safe_open(model / "model.safetensors", "pt") as file:
        prefix = "model.layers.0.mlp."

        def stack(*names: str) -> torch.Tensor:
            experts = range(len(gate_weight))
            return torch.stack(
                [torch.cat([file.get_tensor(f"{prefix}experts.{e}.{n}.weight") for n in names]) for e in experts]
            )

        gate_weight = file.get_tensor(prefix + "gate.weight")
        gate_up, down = stack("gate_proj", "up_proj"), stack("down_proj")
    top_k, num_experts = config.num_experts_per_tok, gate_up.shape[0]

    def gate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = functional.softmax(functional.linear(x, gate_weight), dtype=torch.float, dim=-1)
        weights, ids = torch.topk(scores, top_k, dim=-1)
        if config.norm_topk_prob:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), ids

    def sort(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs of token and slot by expert, and how many each expert has."""
        flat = ids.reshape(-1)
        return torch.argsort(flat, stable=True), torch.bincount(flat, minlength=num_experts)

    def combine(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = torch.empty_like(rows)
        pairs[order] = rows
        return (pairs.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    def loop(x: torch.Tensor) -> torch.Tensor:
        weights, ids = gate(x)
        order, counts = sort(ids)
        rows, done = torch.empty(order.shape[0], x.shape[1], dtype=x.dtype), 0
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            mine = order[done : done + count]
            g, u = functional.linear(x[mine // top_k], gate_up[expert]).chunk(2, dim=-1)
            rows[done : done + count] = functional.linear(functional.silu(g) * u, down[expert])
            done += count
        return combine(rows, order, weights)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        weights, ids = gate(x)
        order, counts = sort(ids)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        g, u = functional.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        rows = functional.grouped_mm(functional.silu(g) * u, down.transpose(1, 2), offs=ends)
        return combine(rows, order, weights)

    def block(implementation: str) -> Callable:
        if config.model_type == "qwen3_moe":
            from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block
        else:
            from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock as Block
        own = transformers.AutoConfig.from_pretrained(model)
        own._experts_implementation = implementation
        with torch.device("meta"):
            module = Block(own)
        module.gate.weight = torch.nn.Parameter(gate_weight, requires_grad=False)
        module.experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        module.experts.down_proj = torch.nn.Parameter(down, requires_grad=False)

        def call(x: torch.Tensor) -> torch.Tensor:
            output = module(x.unsqueeze(0))
            return (output[0] if isinstance(output, tuple) else output).squeeze(0)

        return call

    layers = {"torch loop": loop, "torch grouped_mm": grouped}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        layers[f"transformers {implementation}"] = block(implementation)
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()
    return layers, lambda x: gate(x)[1], expert_bytes * top_k


def check(name: str, dtype: str, got: Any, saved: dict[str, Any], ids: Any) -> float:
    """Relative error on the rows that went to the same experts; stops the program when it is too large."""
    same = (ids.sort(dim=1).values == saved["topk_ids"].sort(dim=1).values).all(dim=1)
    share = same.float().mean().item()
    if len(same) >= 64 and share < SAME_EXPERTS:
        sys.exit(f"{name}: only {share:.0%} of {len(same)} tokens go to the same experts as in ExpertMesh")
    expected = saved["output"][same].float()
    error = ((got[same].float() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    if error > BOUNDS[dtype]:
        sys.exit(f"{name}: relative error {error:.1e} against ExpertMesh, more than {BOUNDS[dtype]:.0e}")
    return error


def main() -> None:
    arguments = parse_arguments()
    if arguments.isa == "avx2":  # before torch is imported
        os.environ.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2")
    import torch
    from safetensors.torch import load_file

    import expertmesh

    torch.set_num_threads(arguments.threads)
    rows = []
    with tempfile.TemporaryDirectory(prefix="expertmesh-bench-") as temporary, torch.inference_mode():
        model = arguments.keep_model or Path(temporary) / "model"
        worker = Worker(arguments, model)
        layers, topk_ids, token_bytes = torch_layers(model)
        client = expertmesh.Client(worker.router, timeout=600)
        for tokens in (int(text) for text in arguments.tokens.split(",")):
            file = Path(temporary) / "call.safetensors"
            worker.save(tokens, file)
            saved = load_file(file)
            x, ids = saved["hidden_states"], topk_ids(saved["hidden_states"])
            array = as_numpy(x)

            runs: dict[str, Callable[[], float]] = {"expertmesh": lambda tokens=tokens: worker.run(tokens)}
            runs["expertmesh python"] = timed(lambda array=array: client.forward(0, array))
            for name, layer in layers.items():
                if name.endswith("batched_mm") and tokens * token_bytes > BATCHED_BYTES:
                    continue
                check(f"{name}, {tokens} tokens", arguments.dtype, layer(x), saved, ids)
                runs[name] = timed(lambda layer=layer, x=x: layer(x))
            for run in runs.values():
                for _ in range(WARM_UP):
                    run()
            milliseconds, contended = take_turns(runs, arguments.repetitions)
            rows += report(arguments, tokens, milliseconds, contended)
        worker.close()
    if arguments.json:
        machine = {"cores": os.cpu_count(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        machine |= {"torch": torch.__version__, "torch_isa": torch.backends.cpu.get_cpu_capability()}
        arguments.json.write_text(json.dumps({"bench": "torch_layer", "machine": machine, "rows": rows}, indent=2))


def family_seconds(pid: int) -> float:
    """Processor time of a process and its descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return 0.0
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds + sum(family_seconds(int(child)) for some in children for child in some)


def foreign_seconds() -> float:
    """Processor time of everybody else, from an arbitrary start."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - family_seconds(os.getpid())


def take_turns(runs: dict[str, Callable[[], float]], repetitions: int) -> tuple[dict[str, list[float]], int]:
    """Milliseconds of each, and how many turns count although others disturbed them: a turn in which they took
    more than 7 % of the processors is repeated, up to twice `repetitions` times in all."""
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    dropped = contended = 0
    while len(milliseconds["expertmesh"]) < repetitions:
        start, foreign = time.perf_counter(), foreign_seconds()
        turn = {}
        for name, run in runs.items():
            time.sleep(PAUSE_SECONDS)
            run()
            turn[name] = run()
        allowed = max(0.03, 0.07 * os.cpu_count() * (time.perf_counter() - start))
        disturbed = foreign_seconds() - foreign > allowed
        if disturbed and dropped < 2 * repetitions:
            dropped += 1
            time.sleep(0.5)
            continue
        contended += disturbed
        for name, value in turn.items():
            milliseconds[name].append(value)
    return milliseconds, contended


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    """f() -> milliseconds of one call."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    return run


def as_numpy(x: Any) -> Any:
    import ml_dtypes
    import torch

    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def report(
    arguments: argparse.Namespace, tokens: int, milliseconds: dict[str, list[float]], contended: int
) -> list[dict[str, Any]]:
    """Prints the rows of one number of tokens and returns them."""
    medians = {name: statistics.median(values) for name, values in milliseconds.items()}
    ours = medians["expertmesh"]
    best = min(median for name, median in medians.items() if not name.startswith("expertmesh"))
    print(f"{arguments.shape} {arguments.dtype} isa {arguments.isa}, {tokens} tokens: ", end="")
    print(f"the best of PyTorch takes {best / ours:.2f} times as long as ExpertMesh")
    if contended:
        print(f"  {contended} of {arguments.repetitions} turns were disturbed by other programs: do not trust them")
    rows = []
    for name, values in milliseconds.items():
        row = {"case": name, "shape": arguments.shape, "format": arguments.dtype, "isa": arguments.isa}
        row |= {"tokens": tokens, "ms_min": min(values), "ms_median": medians[name]}
        row |= {"ratio_to_expertmesh": medians[name] / ours, "contended": contended}
        rows.append(row)
        print(f"  {name:<24} {min(values):9.3f} ms least {medians[name]:9.3f} ms median  {medians[name] / ours:6.2f}")
    sys.stdout.flush()
    return rows


if __name__ == "__main__":
    main()
