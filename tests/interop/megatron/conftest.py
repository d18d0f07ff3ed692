"""Provides the fixtures of the tests of Megatron-LM's layer."""

from __future__ import annotations

import pytest

from ascend_moe.interop.megatron import MoEAuxLossAutoScaler


@pytest.fixture
def loss_scale_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
