"""What several tests check."""

from __future__ import annotations

from collections.abc import Callable

import expertmesh
import grpc
import pytest
import torch


def relative(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative Frobenius error."""
    return (torch.linalg.norm(given.float() - expected.float()) / torch.linalg.norm(expected.float())).item()


def refused(
    call: Callable[[], object], *words: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
) -> None:
    """That the call fails with that code and a message with these words."""
    with pytest.raises(expertmesh.Error) as caught:
        call()
    assert caught.value.code == code
    for word in words:
        assert word in caught.value.message
