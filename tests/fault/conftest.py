"""Fixtures for tests that start, disturb and end the processes of a cluster.

EXPERTMESH_BIN names the folder with the programs (by default build/release/bin). The `expertmesh` package must
be installed: pip install client/python. Tests marked `full` take long and run with `-m full` only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests/integration/python"))  # fake_router: the same sums in numpy

from processes import Processes  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes long; runs with -m full only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """The ends of the processes' logs go with a failure."""
    report = yield
    if report.failed:
        for fixture in ("processes", "shared_processes"):
            for process in getattr(getattr(item, "funcargs", {}).get(fixture), "started", []):
                report.sections.append((f"log of {process.name}", process.tail()))
    return report


@pytest.fixture(scope="session")
def binaries() -> Path:
    folder = Path(os.environ.get("EXPERTMESH_BIN", REPOSITORY / "build/release/bin"))
    if not (folder / "expertmesh").is_file():
        pytest.fail(f"no expertmesh in {folder}: build it, or set EXPERTMESH_BIN to its folder")
    return folder.resolve()


@pytest.fixture
def processes(binaries: Path, tmp_path: Path) -> Iterator[Processes]:
    """For one test: what it starts and does not end is killed after it."""
    running = Processes(binaries, tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared_processes(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """For a module whose tests disturb nothing."""
    running = Processes(binaries, tmp_path_factory.mktemp("shared"))
    yield running
    running.close()
