"""tests/bench/torch_layer.py at a tiny size: every implementation runs, agrees with ours, and is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "torch_layer.py"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_implementation_agrees_and_is_timed(binaries, tmp_path, dtype):
    file = tmp_path / "rows.json"
    arguments = ["--shape", "64x32x8x2", "--dtype", dtype, "--tokens", "1,9", "--repetitions", "1", "--json", str(file)]
    process = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "EXPERTMESH_BIN": str(binaries)},
    )
    assert process.returncode == 0, process.stderr
    rows = json.loads(file.read_text())["rows"]
    for tokens in (1, 9):
        cases = {row["case"] for row in rows if row["tokens"] == tokens}
        assert {"expertmesh", "expertmesh python", "torch loop", "torch grouped_mm"} <= cases
        assert any(case.startswith("transformers") for case in cases)
    assert all(row["ms_min"] > 0 for row in rows)
