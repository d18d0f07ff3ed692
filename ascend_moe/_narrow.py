"""Makes a caller's integers narrower without making others of them: a cast alone keeps the low bits, so 2**32 is 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ascend_moe.errors import InvalidExpertId, need_dtype

_INT32 = torch.iinfo(torch.int32)


def narrow(argument: str, values: Tensor) -> Tensor:
    """Make int32 of int32 or int64 ids, counts or places. No value is read on the host.

    A value that int32 does not hold becomes the nearest that it holds: 2**31 - 1, or -2**31. Neither is an expert, a
    count or a place, nor the -1 of a pair that is not routed, so the rule that looks at them afterwards refuses them.

    Raises:
        ArgumentError: ``values`` have another dtype.
    """
    need_dtype(argument, values, torch.int32, torch.int64)
    return values if values.dtype == torch.int32 else values.clamp(_INT32.min, _INT32.max).to(torch.int32)


def id_text(expert_id: int) -> str:
    """An id in an error's text: the last two of int32 may stand for a wider one."""
    return str(expert_id) + {_INT32.max: " or more", _INT32.min: " or less"}.get(expert_id, "")


@contextmanager
def wide_ids_named(ids: Tensor, rank: int) -> Iterator[None]:
    """Give the id as it was before `narrow` to an InvalidExpertId about ``ids`` of ``rank``, this rank, on the CPU.

    Other ranks have the narrow one alone, which they call "2147483647 or more".
    """
    try:
        yield
    except InvalidExpertId as error:
        if error.details.get("rank") == rank and ids.device.type == "cpu":
            wide = int(ids[error.details["token"], error.details["k"]])
            error.args = (str(error).replace(id_text(error.details["expert_id"]), str(wide)), *error.args[1:])
            error.details["expert_id"] = wide
        raise
