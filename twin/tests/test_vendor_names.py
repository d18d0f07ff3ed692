"""Names of the AscendC API that CANN's communicating kernels use beside those of the other tests."""

from __future__ import annotations

import numpy as np
import pytest
from third_party_runs import HALF, kernels, modes, tiling

from ascendc_twin.errors import TwinFault

ROWS, WIDTH = 5, 32
TILING = bytes(64 + 280) + tiling(ROWS, WIDTH)


@modes
@pytest.mark.parametrize("define,dtype", [(HALF, np.float16), ("DTYPE_X=float", np.float32)])
def test_names_of_the_toolkit_compute_the_same_values(mode: str, define: str, dtype: type) -> None:
    x = np.random.default_rng(4).integers(-4, 5, (ROWS, WIDTH)).astype(dtype)
    y, words = np.zeros((ROWS + 1, WIDTH), dtype), np.zeros(32, np.int32)
    padded = np.arange(1, 33, dtype=np.uint16)
    kernels("vendor_names", define).launch("vendor_names", [x, y, words, padded], TILING, 1, 1, mode=mode)
    want = x.cumsum(axis=1).cumsum(axis=0)
    assert np.array_equal(y[:-1], want) and np.array_equal(y[-1], want[-1])
    assert words[:12].tolist() == [16, 43, 72, 66, 1, (1 << 16) + 7, 32, 224, 1, 16, 9, 256]
    assert padded.tolist() == [*range(1, 6), *[0] * 11, *range(17, 33)]


@modes
def test_calls_of_the_system_and_the_advanced_api(mode: str) -> None:
    x, words, workspace = np.zeros(256, np.float32), np.zeros(64, np.uint32), np.zeros(64, np.int32)
    kernels("vendor_names", HALF).launch("more_names", [x, words, workspace], None, 2, 0, mode=mode)
    magic, shift = words[1:3].tolist()
    assert all((n * magic >> 32) + n >> shift == n // 7 for n in range(0, 2**32, 199999))
    assert (words[0], words[3], words[16]) == (41, 15, 42)
    index = np.arange(1, 9)
    want = [*[5] * 32, *index[:4].repeat(8), *np.tile(index, 4), *[5] * 64, *index.clip(max=2), *index.clip(min=7)]
    assert x.tolist() == [*want, *[0] * 80] and not workspace.any()


@modes
@pytest.mark.parametrize("key,said", [(2, "element 64 of a LocalTensor of 64"), (3, "GlobalTensor of .* holds 0")])
def test_elements_past_the_end_are_found(mode: str, key: int, said: str) -> None:
    args = [np.zeros(8, np.float16), np.zeros(8, np.float16), np.zeros(32, np.int32), np.zeros(16, np.uint16)]
    with pytest.raises(TwinFault, match=said) as caught:
        kernels("vendor_names", HALF).launch("vendor_names", args, TILING, 1, key, mode=mode)
    assert caught.value.finding == "out of bounds"
    assert "vendor_names.cpp" in str(caught.value)


@modes
def test_tensors_over_addresses_of_ub(mode: str) -> None:
    """TBuffAddr that a kernel fills in, offsets and what get_imm gives, with no TPipe at all."""
    x = np.arange(128, dtype=np.float32)
    y, words = np.zeros(128, np.float32), np.zeros(8, np.int32)
    kernels("raw_addresses").launch("raw_addresses", [x, y, words], None, 1, 0, mode=mode)
    assert np.array_equal(y, x + 1) and words[:5].tolist() == [11, 9, 96, 128, 512]


@modes
def test_an_allocator_hands_out_ub(mode: str) -> None:
    x = np.arange(128, dtype=np.float32)
    y = np.zeros(128, np.float32)
    kernels("raw_addresses").launch("raw_addresses", [x, y, np.zeros(8, np.int32)], None, 1, 5, mode=mode)
    assert np.array_equal(y, [*x[:32] + 2, *x[32:] + 1])


RAW = [
    (1, "Adds needs 544 bytes, the UB view holds 512"),
    (2, "missing pipe synchronisation"),
    (3, "address 0x30000 is outside the 196608 bytes of UB"),
    (4, "DataCopy GM->UB needs 512 bytes, the UB view holds 32"),
    (6, "address 0x30000 is outside the 196608 bytes of UB"),
    (7, "a LocalTensor of 128 bytes with 64 bytes of UB behind its begin"),
]


@modes
@pytest.mark.parametrize("key,said", RAW)
def test_addresses_of_ub_are_checked(mode: str, key: int, said: str) -> None:
    if (mode, key) == ("fast", 2):
        return  # it looks for no races
    args = [np.zeros(128, np.float32), np.zeros(128, np.float32), np.zeros(8, np.int32)]
    with pytest.raises(TwinFault, match=said):
        kernels("raw_addresses").launch("raw_addresses", args, None, 1, key, mode=mode)
