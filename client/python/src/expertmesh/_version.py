"""The version, in one place; equal to the project's in CMakeLists.txt."""

__version__ = "0.1.0"
