"""Build step of the package: generates the stubs of proto/expertmesh/v1 (the rest is in pyproject.toml)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "src"
PROTOS = "expertmesh/v1"


def proto_root() -> Path:
    """The folder that holds expertmesh/v1/*.proto: in a source distribution, in a checkout, or named."""
    candidates = [HERE / "proto", HERE.parents[1] / "proto"]
    if named := os.environ.get("EXPERTMESH_PROTO_DIR"):
        candidates.insert(0, Path(named))
    for root in candidates:
        if (root / PROTOS / "moe.proto").is_file():
            return root
    raise SystemExit(
        f"expertmesh: no {PROTOS}/moe.proto in {', '.join(map(str, candidates))}; build from a checkout, "
        "or set EXPERTMESH_PROTO_DIR to its proto folder"
    )


def program(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(
            f"expertmesh: {name} was not found, and the stubs are generated with it. It is in the Debian "
            f"package {package}: apt-get install protobuf-compiler protobuf-compiler-grpc"
        )
    return path


def generate(destination: Path) -> None:
    """Writes expertmesh/v1/*_pb2.py, *_pb2.pyi and *_pb2_grpc.py below `destination`."""
    root = proto_root()
    destination.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            program("protoc", "protobuf-compiler"),
            f"--proto_path={root}",
            f"--python_out={destination}",
            f"--pyi_out={destination}",
            f"--plugin=protoc-gen-grpc={program('grpc_python_plugin', 'protobuf-compiler-grpc')}",
            f"--grpc_out={destination}",
            *sorted(str(proto) for proto in (root / PROTOS).glob("*.proto")),
        ],
        check=True,
    )


class BuildPy(build_py):
    def run(self) -> None:
        editable = getattr(self, "editable_mode", False)
        if not editable:  # what an earlier build left there would be packed too
            shutil.rmtree(Path(self.build_lib) / "expertmesh", ignore_errors=True)
        super().run()
        generate(SOURCE if editable else Path(self.build_lib))


class SDist(sdist):
    def make_release_tree(self, base_dir, files) -> None:
        super().make_release_tree(base_dir, files)
        destination = Path(base_dir) / "proto" / PROTOS
        destination.mkdir(parents=True, exist_ok=True)
        for proto in (proto_root() / PROTOS).glob("*.proto"):
            shutil.copy2(proto, destination)


setup(cmdclass={"build_py": BuildPy, "sdist": SDist})
