"""Fixtures: clusters of real processes.

EXPERTMESH_BIN names the folder with the `expertmesh` binary (by default build/release/bin). The `expertmesh`
package must be installed: pip install client/python.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
START_SECONDS = 60
STOP_SECONDS = 30


@pytest.fixture(scope="session")
def binaries() -> Path:
    folder = Path(os.environ.get("EXPERTMESH_BIN", REPOSITORY / "build" / "release" / "bin"))
    if not (folder / "expertmesh").is_file():
        pytest.fail(f"no expertmesh in {folder}: build it, or set EXPERTMESH_BIN to its folder")
    return folder.resolve()


@pytest.fixture
def cluster(binaries: Path, tmp_path_factory) -> Iterator[Callable[..., str]]:
    """cluster(model_dir, servers=1, *options) starts a router and expert servers; the router's HOST:PORT.

    options: more of `serve`'s. They get SIGTERM when the test is over, and have to exit with 0.
    """
    started: list[tuple[subprocess.Popen, Path]] = []

    def start(model_dir: Path, servers: int = 1, *options: str) -> str:
        log = tmp_path_factory.mktemp("cluster") / "log"
        command = [binaries / "expertmesh", "serve", "--model", model_dir]
        command += ["--servers", str(servers), "--port", "0", *options]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        started.append((process, log))
        return ready_address(process, log)

    yield start
    for process, _ in started:
        process.send_signal(signal.SIGTERM)
    failures = []
    for process, log in started:
        try:
            process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        if process.returncode != 0:
            failures.append(f"exit code {process.returncode} after SIGTERM\n{log.read_text()}")
    assert not failures, "\n".join(failures)


def ready_address(process: subprocess.Popen, log: Path) -> str:
    """What the process prints once it serves, alone on a line: ready HOST:PORT."""
    assert process.stdout is not None
    output = b""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if not select.select([process.stdout], [], [], 0.2)[0]:
            continue
        data = os.read(process.stdout.fileno(), 4096)
        if not data:
            break
        output += data
        for line in output.split(b"\n")[:-1]:
            if line.startswith(b"ready "):
                return line.removeprefix(b"ready ").decode().strip()
    process.kill()
    pytest.fail(f"no ready line within {START_SECONDS} s; stdout: {output!r}; log:\n{log.read_text()}")
