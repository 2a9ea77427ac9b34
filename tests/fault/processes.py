"""Real processes of a cluster, each started, watched and ended by its pid; their output goes to files."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

START_SECONDS = 60  # generous: the machine may be busy with something else
STOP_SECONDS = 30
T = TypeVar("T")


def wait_until(what: str, condition: Callable[[], T], seconds: float = START_SECONDS) -> T:
    """The first true value of `condition`, which is asked again and again; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    """One that is free now and that no outgoing connection takes meanwhile (below the ephemeral range)."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.randint(20000, 32000)))
            except OSError:
                continue
            return probe.getsockname()[1]


def exists(pid: int) -> bool:
    """Whether a process of that id runs (a zombie, of which only the exit code is left, does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Process:
    """One daemon. `output` and `log` are the files of its standard output and error."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self.name = name
        self.output = folder / f"{name}.out"
        self.log = folder / f"{name}.log"
        with self.output.open("wb") as output, self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=output, stderr=log)
        self.pid = self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def address(self) -> str:
        """HOST:PORT, from the line `listening HOST:PORT` or `ready HOST:PORT` that it prints once it serves."""

        def printed() -> str | None:
            lines = self.output.read_text().rpartition("\n")[0].splitlines()  # whole ones
            found = [line.split()[1] for line in lines if line.startswith(("listening ", "ready "))]
            assert found or self.running(), f"{self.name} ended before it served:\n{self.tail()}"
            return found[0] if found else None

        return wait_until(f"the address of {self.name}", printed)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Its exit code: negative, the number of the signal that ended it."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds} s:\n{self.tail()}") from None

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        """SIGKILL; does nothing to a process that has ended."""
        if self.running():
            self._process.kill()
            self._process.wait()

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def resident(process: Process) -> int:
    """Bytes of memory that it holds now."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files(process: Process) -> int:
    """How many descriptors it has."""
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


class Processes:
    """Starts daemons and commands from the folder `binaries`; `close` ends what is left of them."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.binaries = binaries
        self.folder = folder
        self.started: list[Process] = []

    def start(self, *command: object, name: str = "process") -> Process:
        text = [str(word) for word in command]
        process = Process(text, self.folder, f"{len(self.started)}-{name}")
        self.started.append(process)
        return process

    def serve(self, model: Path, servers: int, *options: object, port: int = 0) -> Process:
        command = [self.binaries / "expertmesh", "serve", "--model", model, "--servers", servers]
        return self.start(*command, "--port", port, "--threads", 1, *options, name="serve")

    def router(self, model: Path, *options: object, port: int = 0) -> Process:
        command = [self.binaries / "expertmesh-router", "--model", model, "--listen", f"127.0.0.1:{port}"]
        return self.start(*command, *options, name="router")

    def server(
        self, model: Path, router: str, shard: str = "0/1", *options: object, port: int = 0, prefix: tuple = ()
    ) -> Process:
        command = [self.binaries / "expertmesh-expert-server", "--model", model, "--router", router]
        command += ["--listen", f"127.0.0.1:{port}", "--shard", shard, "--threads", 1]
        return self.start(*prefix, *command, *options, name=f"server-{shard.replace('/', '-of-')}")

    def by_hand(self, model: Path, servers: int) -> tuple[Process, list[Process], str]:
        """A router and expert servers, each started by itself: router, servers, the router's address."""
        router = self.router(model)
        address = router.address()
        shards = [self.server(model, address, f"{i}/{servers}") for i in range(servers)]
        self.wait_serving(address)
        return router, shards, address

    def cli(self, *arguments: object, seconds: float = START_SECONDS) -> subprocess.CompletedProcess:
        command = [str(word) for word in (self.binaries / "expertmesh", *arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)

    def status(self, router: str) -> dict:
        done = self.cli("status", "--router", router, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def states(self, router: str) -> dict[str, str]:
        """State of every server, by its name."""
        return {server["name"]: server["state"] for server in self.status(router)["servers"]}

    def healthy(self, router: str) -> bool:
        return self.cli("health", "--router", router).returncode == 0

    def wait_serving(self, router: str) -> None:
        wait_until(f"the cluster at {router} serves", lambda: self.healthy(router))

    def close(self) -> None:
        for process in self.started:
            process.kill()


def children(process: Process) -> list[int]:
    """Ids of its child processes."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def peak_memory(process: Process) -> int:
    [line] = [s for s in Path(f"/proc/{process.pid}/status").read_text().splitlines() if s.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_idle(process: Process) -> None:
    """Returns once the process has used (nearly) no processor for half a second."""
    last, since = cpu_seconds(process), time.monotonic()

    def idle() -> bool:
        nonlocal last, since
        now = cpu_seconds(process)
        if now - last > 0.05:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 0.5

    wait_until(f"{process.name} is idle", idle)
