"""cann_ops_transformer.ops: MegaMoe's pair by CANN's module name, and how the module is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import ascend_moe
from ascend_moe.errors import AscendMoeError
from ascend_moe.interop import cann_ops_transformer as adapter


def test_install_and_uninstall() -> None:
    assert importlib.util.find_spec("cann_ops_transformer") is None
    adapter.uninstall()
    whole = adapter.install()
    assert adapter.install() is whole and "ascend_moe" in str(whole.__doc__)
    import cann_ops_transformer.ops as found  # type: ignore[import-not-found]

    assert importlib.util.find_spec("cann_ops_transformer") is not None
    assert found.mega_moe is ascend_moe.layer_ops.mega_moe
    assert found.get_symm_buffer_for_mega_moe is ascend_moe.layer_ops.get_symm_buffer_for_mega_moe
    with pytest.raises(ImportError):
        importlib.import_module("cann_ops_transformer.common")
    adapter.uninstall()
    assert not [name for name in sys.modules if name.startswith("cann_ops_transformer")]
    assert importlib.util.find_spec("cann_ops_transformer") is None


def test_it_stands_in_for_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cann_ops_transformer").mkdir()
    (tmp_path / "cann_ops_transformer" / "__init__.py").write_text("ops = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for _ in range(2):  # before it is imported, and after
            with pytest.raises(AscendMoeError, match="cann_ops_transformer is installed"):
                adapter.install()
            real = importlib.import_module("cann_ops_transformer")
            adapter.uninstall()
            assert sys.modules["cann_ops_transformer"] is real
    finally:
        del sys.modules["cann_ops_transformer"]
