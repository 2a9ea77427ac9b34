"""What a server reads and keeps while it loads: its own experts, once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import REPOSITORY
from processes import Process

SERVERS, EXPERTS, HIDDEN, WIDTH = 4, 64, 1024, 512
SHARDS = 4
MIB = 1 << 20
SLACK = 6 * MIB  # of memory: what the headers and the allocator take
BLOCK = "model.layers.0.mlp."
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def bf16() -> tuple[dict, Tensors]:
    tensors = {}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            tensors[f"{BLOCK}experts.{expert}.{name}_proj.weight"] = ("BF16", shape)
    return {"model_type": "olmoe", "num_experts": EXPERTS}, tensors


def fp8() -> tuple[dict, Tensors]:
    config, tensors = bf16()
    scales = {f"{name}_scale_inv": ("F32", (n // 128, k // 128)) for name, (_, (n, k)) in tensors.items()}
    tensors = {name: ("F8_E4M3", shape) for name, (_, shape) in tensors.items()}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return config, tensors | scales


def mxfp4() -> tuple[dict, Tensors]:
    """All experts in one tensor."""
    tensors = {BLOCK + "router.bias": ("BF16", (EXPERTS,))}
    for name, n, k in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        prefix = f"{BLOCK}experts.{name}_proj_"
        tensors[prefix + "blocks"] = ("U8", (EXPERTS, n, k // 32, 16))
        tensors[prefix + "scales"] = ("U8", (EXPERTS, n, k // 32))
        tensors[prefix + "bias"] = ("BF16", (EXPERTS, n))
    config = {"model_type": "gpt_oss", "num_local_experts": EXPERTS, "swiglu_limit": 7.0}
    return config | {"quantization_config": {"quant_method": "mxfp4"}}, tensors


def write(folder: Path, config: dict, tensors: Tensors) -> list[Path]:
    """In files of about the same size, by name; on the disk when this returns."""
    config |= {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    config |= {"num_experts_per_tok": 2, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    gate = "router" if config["model_type"] == "gpt_oss" else "gate"
    tensors[f"{BLOCK}{gate}.weight"] = ("BF16", (EXPERTS, HIDDEN))
    random = np.random.default_rng(0)
    some = {  # of each kind, again and again
        "F32": np.full(1 << 18, 0.01, np.float32).tobytes(),
        "BF16": (random.standard_normal(1 << 19, np.float32) / 32).astype(ml_dtypes.bfloat16).tobytes(),
        "F8_E4M3": (random.integers(0, 256, MIB, np.uint8) & 0xF7).tobytes(),  # no NaN
        "U8": random.integers(0, 253, MIB, np.uint8).tobytes(),
    }
    whole = sum(prod(shape) * BYTES[dtype] for dtype, shape in tensors.values())
    weight_map, paths, names = {}, [], sorted(tensors)
    for shard in range(SHARDS):
        header, offset, content = {}, 0, []
        while names and (offset < whole / SHARDS or shard == SHARDS - 1):
            name = names.pop(0)
            dtype, shape = tensors[name]
            end = offset + prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            content.append((some[dtype], end - offset))
            offset = end
        path = folder / f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        weight_map |= dict.fromkeys(header, path.name)
        encoded = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for tile, count in content:
                file.writelines([tile] * (count // len(tile)))
                file.write(tile[: count % len(tile)])
            file.flush()
            os.fsync(file.fileno())
        paths.append(path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return paths


def drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def proc_field(process: Process, file: str, name: str) -> int:
    for line in Path(f"/proc/{process.pid}/{file}").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise AssertionError(f"/proc/{process.pid}/{file} has no {name}")


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """Not below /tmp, which may be memory."""
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="loading-", dir=build) as folder:
        yield Path(folder)


@pytest.mark.parametrize("model", [bf16, fp8, mxfp4])
def test_a_server_reads_its_own_experts_only_and_holds_them_once(
    processes, disk_folder, model: Callable[[], tuple[dict, Tensors]]
):
    files = write(disk_folder, *model())
    size = sum(file.stat().st_size for file in files)
    plan = json.loads(processes.cli("inspect", disk_folder, "--servers", str(SERVERS), "--json").stdout)
    router = processes.router(disk_folder).address()
    idle = processes.server(disk_folder, router, "99/100")  # holds no expert
    idle.address()
    base = proc_field(idle, "status", "VmRSS") << 10
    for shard in range(SERVERS):
        drop_from_cache(files)
        server = processes.server(disk_folder, router, f"{shard}/{SERVERS}")
        server.address()  # has loaded
        own = plan["servers"][shard]["bytes"]
        assert abs(own - size / SERVERS) < 0.05 * own
        read = proc_field(server, "io", "read_bytes")
        held = (proc_field(server, "status", "VmRSS") << 10) - base
        print(f"{model.__name__}: {own / MIB:.1f} MiB of experts, {read / MIB:.1f} read, {held / MIB:.1f} held")
        assert read > 0, f"the files in {disk_folder} were not read from a disk"
        assert 0.9 * own < read <= 1.1 * own
        assert 0.9 * own < held <= own + SLACK
    processes.wait_serving(router)
