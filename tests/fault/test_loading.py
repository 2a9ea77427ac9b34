"""What a server reads and keeps while it loads: its own experts, once."""

from __future__ import annotations

import json
from pathlib import Path

from models import write_checkpoint

SERVERS = 4
SLACK = 4 << 20  # the file's header, the fingerprint's samples, shared libraries, /proc


def proc_field(pid: int, file: str, name: str) -> int:
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise AssertionError(f"/proc/{pid}/{file} has no {name}")


def test_a_server_reads_its_own_experts_only_and_holds_them_once(processes, tmp_path):
    model = write_checkpoint(
        tmp_path / "model", experts=16, top_k=2, hidden=1024, intermediate=1024, layers=2, sparse=True
    )
    plan = json.loads(processes.cli("inspect", model, "--servers", str(SERVERS), "--json").stdout)
    router = processes.router(model).address()
    idle = processes.server(model, router, "99/100")  # holds no expert
    idle.address()
    base = proc_field(idle.pid, "status", "VmRSS") * 1024
    for shard in (0, SERVERS - 1):
        server = processes.server(model, router, f"{shard}/{SERVERS}")
        server.address()  # has loaded
        own = plan["servers"][shard]["bytes"]
        assert own == 8 * 3 * 1024 * 1024 * 2  # 4 of 16 experts in 2 layers, bf16
        read = proc_field(server.pid, "io", "rchar")
        assert own <= read <= own * 1.1 + SLACK, f"read {read} bytes for {own} bytes of experts"
        held = proc_field(server.pid, "status", "VmRSS") * 1024 - base
        assert held <= own * 1.1 + SLACK, f"{held} bytes of memory for {own} bytes of experts"
