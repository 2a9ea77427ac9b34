"""`expertmesh bench` at tiny sizes: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
SHAPE = "64x32x8x2"
SECONDS = 120

Bench = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def bench(binaries: Path, tmp_path: Path) -> Bench:
    """bench(arguments...) runs the command; its temporary folders have to be gone afterwards."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
        process = subprocess.run(
            [binaries / "expertmesh", "bench", *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "TMPDIR": str(temporary)},
            **options,
        )
        assert not list(temporary.iterdir())
        return process

    return run


@pytest.fixture
def report(bench: Bench, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """report(name, arguments...) runs a benchmark; the rows it wrote, after checks that hold for all."""

    def run(name: str, *arguments: str) -> list[dict[str, Any]]:
        file = tmp_path / f"{name}.json"
        process = bench(name, *arguments, "--json", str(file))
        assert process.returncode == 0, process.stderr
        whole = json.loads(file.read_text())
        assert whole["bench"] == name
        assert set(whole["machine"]) == {"cpu", "isa", "cores", "date", "version"}
        assert "avx2" in whole["machine"]["isa"] and whole["machine"]["cores"] >= 1
        assert whole["rows"]
        for row in whole["rows"]:
            assert row["case"] in process.stdout
            assert 0 < row.get("ms_min", 1) <= row.get("ms_median", 1)
        return whole["rows"]

    return run


def test_roofline(report):
    rows = {row["case"]: row for row in report("roofline", "--probe-mib", "64", "--repetitions", "3")}
    assert {"read", "fma256"} <= set(rows)
    assert rows["read"]["unit"] == "GB/s" and 0.5 < rows["read"]["max"] < 5000
    for name, row in rows.items():
        assert 0 < row["median"] <= row["max"], name
        if name != "read":  # billions a second, even where others compute as well
            assert 2 < row["max"] / row["threads"] < 2000, name


def test_gemm(report):
    arguments = ("--n", "200", "--k", "101", "--weights-mib", "1", "--probe-mib", "16", "--repetitions", "2")
    rows = report("gemm", *arguments, "--rows", "1,7", "--isa", "avx2,avx2")
    assert [(row["format"], row["rows_per_expert"]) for row in rows] == [
        (name, count) for name in ("bf16", "fp32", "f16") for count in (1, 1, 7, 7)
    ]
    for row in rows:
        element = 4 if row["format"] == "fp32" else 2
        assert row["experts"] == -(-(1 << 20) // (200 * 101 * element))  # rounded up
        weights = row["experts"] * 200 * 101 * element
        assert row["gb_per_s"] == pytest.approx(1e-6 * weights / row["ms_median"])
        flops = 2 * row["experts"] * row["rows_per_expert"] * 200 * 101
        assert row["gflops"] == pytest.approx(1e-6 * flops / row["ms_median"])


def test_gemm_with_quantised_weights(report, bench):
    arguments = ("--n", "200", "--k", "102", "--weights-mib", "1", "--probe-mib", "16", "--repetitions", "2")
    formats = {"fp8": 1.0, "fp8_row": 1.0, "mxfp4": 0.5}  # bytes of a weight
    rows = report("gemm", *arguments, "--rows", "1,9", "--formats", ",".join(formats))
    assert {(row["format"], row["rows_per_expert"]) for row in rows} == {(f, n) for f in formats for n in (1, 9)}
    for row in rows:
        weights = row["experts"] * 200 * 102 * formats[row["format"]]
        scales = row["experts"] * (200 * 102 // 32) if row["format"] == "mxfp4" else 0
        assert row["gb_per_s"] == pytest.approx(1e-6 * (weights + scales) / row["ms_median"])
        assert row["pack_gb_s"] > 0
    odd = bench("gemm", "--k", "101", "--formats", "mxfp4")
    assert odd.returncode == 1 and "k: expected an even number for mxfp4, got 101" in odd.stderr


def test_layer_compares_dtypes(report):
    arguments = ("--shape", "160x96x8x2", "--tokens", "3,5", "--probe-mib", "16", "--repetitions", "1")
    dtypes = ["bf16", "fp8", "fp8_row", "mxfp4"]
    rows = report("layer", *arguments, "--servers", "0", "--in-process", "--dtype", ",".join(dtypes))
    assert [(row["tokens"], row["format"]) for row in rows] == [(t, d) for t in (3, 5) for d in dtypes]
    for i, row in enumerate(rows):
        first = rows[i // len(dtypes) * len(dtypes)]
        assert 0 < row["ms_median"] == pytest.approx(row["ratio_to_bf16"] * first["ms_median"])


def test_layer(report):
    arguments = ("--shape", SHAPE, "--tokens", "1,8", "--probe-mib", "16", "--repetitions", "2")
    rows = report("layer", *arguments, "--servers", "2", "--in-process", "--dtype", "fp32", "--isa", "avx2")
    assert [(row["case"], row["tokens"]) for row in rows] == [
        ("grpc", 1),
        ("in process", 1),
        ("grpc", 8),
        ("in process", 8),
    ]
    for row in rows:
        assert (row["shape"], row["format"], row["isa"]) == (SHAPE, "fp32", "avx2")
        # With one token, top-2 reaches two experts with a row each.
        assert 2 <= row["experts"] <= 8
        assert row["rows_per_expert"] == pytest.approx(row["tokens"] * 2 / row["experts"])
        weights = 4 * (3 * 64 * 32 * row["experts"] + 8 * 64)
        assert row["gb_per_s"] == pytest.approx(1e-6 * weights / row["ms_median"])
        assert 0 < row["efficiency"]


def test_layer_stages(report):
    """`client` and `wire` are what the counters leave of the total, so only the others are measured."""
    arguments = ("--shape", "256x128x8x2", "--tokens", "16", "--probe-mib", "16", "--repetitions", "1", "--stages")
    call, stages = report("layer", *arguments)
    assert (call["case"], stages["case"], stages["tokens"]) == ("grpc", "stages, ms", 16)
    names = ("client", "gate", "plan", "gather", "wire", "server_gather", "gemm", "combine")
    assert all(stages[name] > 0 for name in names), stages
    measured = ("gate", "plan", "gather", "server_gather", "gemm", "combine")
    assert sum(stages[name] for name in measured) < stages["total"]


def test_layer_keeps_a_model(bench, tmp_path):
    model = tmp_path / "model"
    arguments = ("--shape", SHAPE, "--tokens", "1", "--probe-mib", "16", "--repetitions", "1", "--servers", "1")
    assert bench("layer", *arguments, "--keep-model", str(model)).returncode == 0
    written = (model / "model.safetensors").stat()
    assert bench("layer", *arguments, "--keep-model", str(model)).returncode == 0
    again = (model / "model.safetensors").stat()
    assert (written.st_ino, written.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    other = bench("layer", *arguments, "--dtype", "fp32", "--keep-model", str(model))
    assert other.returncode == 1 and "another model" in other.stderr


def test_layer_worker(bench, tmp_path):
    saved = tmp_path / "saved.safetensors"
    lines = f"run 4 3\nsave 4 {saved}\nrun\nwalk 4\nrun 1 1\n"
    process = bench("layer", "--shape", SHAPE, "--servers", "1", "--worker", input=lines)
    assert process.returncode == 0, process.stderr
    ready, run, save, missing, unknown, last = process.stdout.splitlines()
    assert ready.startswith("ready 127.0.0.1:")
    assert len([float(ms) for ms in run.split()]) == 3
    assert save == f"saved {saved}"
    header = json.loads(saved.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    assert {name: header[name]["shape"] for name in ("hidden_states", "output", "topk_ids")} == {
        "hidden_states": [4, 64],
        "output": [4, 64],
        "topk_ids": [4, 2],
    }
    assert missing.startswith("error ") and "tokens" in missing
    assert unknown.startswith("error ") and "walk" in unknown
    assert float(last) > 0


def test_wire(report):
    rows = report("wire", "--shape", SHAPE, "--tokens", "1,8", "--repetitions", "2")
    assert [(row["case"], row["tokens"]) for row in rows] == [
        ("expertmesh", 1),
        ("relay", 1),
        ("expertmesh", 8),
        ("relay", 8),
    ]
    ours, relay = rows[2:]
    assert ours["ratio_to_relay"] == pytest.approx(ours["ms_median"] / relay["ms_median"])
    assert ours["ratio_without_gate"] < ours["ratio_to_relay"]


def test_permute(report):
    arguments = ("--tokens", "512", "--round-tokens", "128", "--experts", "16", "--hidden-size", "32")
    rows = report("permute", *arguments, "--servers", "1,4", "--repetitions", "1")
    assert [row.get("servers") for row in rows] == [None, None, 1, 4]
    one, four = rows[2:]
    assert one["rows_sent_per_token"] == 1
    # 4 * (1 - C(12, 8) / C(16, 8)) servers a token on average, when routing is uniform.
    assert four["rows_sent_per_token"] == pytest.approx(4 * (1 - 495 / 12870), rel=0.05)
    for row in (one, four):
        parts = row["plan_ns"] + row["gather_ns"] + row["combine_ns"]  # of the one repetition
        assert parts == pytest.approx(row["ns_per_token"])


def test_load(report, cluster):
    router = cluster(GOLDEN / "tiny-olmoe", servers=2)
    (row,) = report("load", "--router", router, "--clients", "3", "--tokens", "2", "--seconds", "1")
    assert row["calls"] > 0 and row["errors"] == {}
    assert row["tokens_per_s"] == pytest.approx(2 * row["calls_per_s"])
    assert 0 < row["ms_p50"] <= row["ms_p90"] <= row["ms_p99"] <= row["ms_max"]


def test_load_wants_a_layer_that_is_there(bench, cluster):
    router = cluster(GOLDEN / "tiny-olmoe")
    process = bench("load", "--router", router, "--layer", "99", "--seconds", "1")
    assert process.returncode == 1 and "layer" in process.stderr and "99" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["gemm", "--formats", "q8"], 'formats: .*"q8"'),
        (["gemm", "--isa", "sse"], 'isa: .*"sse"'),
        (["layer", "--shape", "olmo"], 'shape: .*"olmo"'),
        (["layer", "--shape", "64x32x8x9"], "shape: .*9"),
        (["layer", "--dtype", "q8"], 'dtype: .*"q8"'),
        (["layer", "--isa", "sse"], 'isa: .*"sse"'),
        (["layer", "--engine", "fast"], 'engine: .*"fast"'),
        (["layer", "--servers", "0"], "servers: .*0"),
        (["layer", "--dtype", "bf16,fp8", "--worker"], "dtype: .*one with --worker, got 2"),
        (["layer", "--tokens", "0"], "--tokens: .*0"),
        (["wire", "--shape", "60x32x8x2"], "shape: .*60x32x8x2"),
        (["wire", "--tokens", "4096"], "tokens: .*4096"),
        (["permute", "--experts", "4", "--top-k", "8"], "top-k: .*4.*8"),
        (["load", "--dtype", "i8"], 'dtype: .*"i8"'),
        (["load", "--router", "nowhere"], "nowhere"),
        (["roofline", "--repetitions", "0"], "--repetitions: .*0"),
        (["roofline", "--probe-mib", "16", "--repetitions", "1", "--json", "/no/such/file"], "json: .*/no/such"),
        ([], "subcommand"),
    ],
)
def test_refusals(bench, arguments, named):
    process = bench(*arguments)
    assert process.returncode != 0
    assert process.stderr and re.search(named, process.stderr), process.stderr


def test_help_teaches(bench):
    for arguments in ([], ["roofline"], ["gemm"], ["layer"], ["wire"], ["permute"], ["load"]):
        process = bench(*arguments, "--help")
        assert process.returncode == 0 and len(process.stdout) > 300
        assert "relay-server" not in process.stdout  # processes of `wire` are not for people
