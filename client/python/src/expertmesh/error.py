"""The one exception of the package."""

from __future__ import annotations

import grpc


class Error(Exception):
    """A call failed, here or in the cluster.

    `code` says what kind of failure it was, with the meanings of moe.proto: INVALID_ARGUMENT (an argument is
    wrong), UNAVAILABLE (no router, or experts without a live server), DEADLINE_EXCEEDED, FAILED_PRECONDITION
    (another model than expected, or a closed client), UNIMPLEMENTED, RESOURCE_EXHAUSTED (a queue is full).
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"
