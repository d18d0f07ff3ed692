"""Typed errors. A message is one line: what is wrong, for which argument or rank, the rule, the fix.

There are three kinds:

* local: ``ArgumentError`` and its children, ``CommBusy`` and ``CommClosed``. One rank alone raises it, before it
  touches its window. A corrected call works.
* collective: ``InvalidExpertId``, ``RoutingOverflow`` and ``ConfigMismatch``, and an ``ArgumentError`` about
  values in ep_send_counts or assist_info_for_combine: every rank raises the same error. ``RoutingMismatch``:
  the rank that sees it raises it. The communicator stays usable.
* fatal: ``CommError`` and its children ``PeerLost``, ``CommTimeout``, ``CorruptStatus``. The communicator has
  failed until it is closed and opened again; on an NPU until its process group is made anew.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


class AscendMoeError(RuntimeError):
    """Base of every error that this package raises on purpose.

    Args:
        message: the one line.
        details: what becomes the error's attributes, by name.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        self.others: dict[int, BaseException] = {}

    def __getattr__(self, name: str) -> Any:
        # Python calls this for a missing attribute: details are attributes (error.rank, error.field).
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class ArgumentError(AscendMoeError, ValueError):
    """Raised where an argument breaks a rule: shape, dtype, range, a mode that is not supported.

    Every rank raises it where combine got an ``ep_send_counts`` or ``assist_info_for_combine`` that dispatch cannot
    have returned: give combine dispatch's tensors; ``direct`` also needs them in dispatch's order.

    Attributes:
        argument: its name.
        rank: the rank that passed it, where that is known.

    What to do: the text has the rule and the value.
    """


class WindowTooSmall(ArgumentError):
    """Raised where the window cannot hold what this call may send.

    Attributes:
        needed_mib: what it needs, in MiB.
        variable: the variable to export it as.

    What to do: export ``HCCL_BUFFSIZE`` as the text says, on all ranks, before the group's first op;
    ``ascend-moe plan`` says it beforehand.
    """


class WindowTensorError(ArgumentError):
    """Raised where a tensor of ``window_empty`` was used twice, or belongs to another window.

    Attributes:
        generation: the tensor's number.
        epoch: that of the combine that has consumed it, or 0.

    What to do: take a new one for every combine (docs/layers.md).
    """


class CommBusy(AscendMoeError):
    """Raised where close waits in vain for an op that another thread runs on the communicator, which stays open.

    Attributes:
        rank: whose end it is.

    What to do: close it once the op has returned or raised.
    """


class CommClosed(AscendMoeError):
    """Raised where an op's communicator was closed by another thread, or before the finish of what was begun.

    Attributes:
        rank: whose end it is, where that is known.

    What to do: finish what was begun before close; the group's next op opens fresh windows.
    """


class InvalidExpertId(AscendMoeError, ValueError):
    """Raised where an active id is neither -1 nor in 0..E-1.

    Attributes:
        rank, token, k: where it is.
        expert_id: the id.

    What to do: look at the router of that rank; int64 ids of the adapters: one that int32 does not hold is told as
    "2147483647 or more" by the other ranks.
    """


class RoutingOverflow(AscendMoeError):
    """Raised where a rank sends one owner more rows than maxBS · min(K, L): the window has no room for more duplicates.

    Attributes:
        rank, owner: who sends, and to whom.
        rows, capacity: how many, and the most.

    What to do: no duplicate ids, or a larger ``global_bs``.
    """


class RoutingMismatch(AscendMoeError):
    """Raised where combine's ids, mask or counts give an expert other rows than the dispatch's.

    The rank that sees it raises it; ids permuted within equal counts are seen with ``ASCEND_MOE_CHECK_PAIRS=1``.

    Attributes:
        rank, expert: whose rows.
        ours, theirs: the two numbers of rows.
        token, k: instead of these where the row of a pair has not come at all.

    What to do: give combine what dispatch got and returned.
    """


class ConfigMismatch(AscendMoeError):
    """Raised where ranks called with different H, K, E, BS, dtype, mode or op, or opened a group with other settings.

    Attributes:
        field: what differs.
        rank: the other rank.
        ours, theirs: the two values.

    What to do: the text has both values.
    """


class CommError(AscendMoeError):
    """The communicator has failed and must be closed.

    Attributes:
        rank: who caused it.
        reporter: who found it.
        phase: in which op, or step of the group.
        level: with ``comm_alg="hierarchy"`` between servers, where a wait of the op has found it: 1, the reporter
            awaited what it forwards, or 2, what others forward to it.
    """


class PeerLost(CommError):
    """Raised where a rank's process has died or closed its end; known within 2 s on a CPU.

    Attributes:
        rank: who is lost.
        reporter: who found it.
        phase, level: as of ``CommError``.

    What to do: see why that rank ended.
    """


class CommTimeout(CommError):
    """Raised where a rank did not arrive within ``ASCEND_MOE_TIMEOUT_S``.

    Attributes:
        rank: who did not come.
        reporter: who waited.
        phase, level: as of ``CommError``.

    What to do: the text says what that rank was last seen doing, and whether it is in an op or in Python code; did
    every rank call the same ops in the same order?
    """


class CorruptStatus(CommError):
    """Raised where a status block holds what no rank of this epoch can have written.

    Attributes:
        rank: whose block.
        reporter: who read it.
        phase, level: as of ``CommError``.

    What to do: something else wrote into the window: another library on the same communicator?
    """


class LibraryError(AscendMoeError, ImportError):
    """Raised where a native library is missing, does not load, or was built from other sources.

    What to do: the text has the command that builds it.
    """


class KernelFault(AscendMoeError):
    """Raised where the twin stopped a kernel that broke a rule of the hardware: bounds, alignment, queues, races.

    Attributes:
        rank: where, for the kernels of this package.

    What to do: the text names file and line (docs/twin.md).
    """


# ---- rules of arguments


def need(kept: bool, argument: str, rule: str, *values: object) -> None:
    """Raise ``ArgumentError`` unless the rule is kept. The message is the argument's name, then ``rule``.

    ``values`` go into the places ``{}`` of ``rule`` when it is raised: a text made on every call costs time, and under
    torch.compile it makes a number of each size in it. A tensor is shown by its shape and dtype.
    """
    if not kept:
        text = rule.format(*map(_shown, values)) if values else rule
        raise ArgumentError(f"{argument} {text}", argument=argument)


def _shown(value: Any) -> object:
    """Returns what an error says of a value: of a tensor its shape and dtype, of a ``torch.Size`` a tuple."""
    if isinstance(value, (int, float, str, list, tuple, type(None))):
        return tuple(value) if isinstance(value, tuple) else value
    is_tensor = hasattr(value, "is_floating_point") and hasattr(value, "shape")
    return f"{tuple(value.shape)} {_name(value.dtype)}" if is_tensor else value


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def need_unset(**arguments: object) -> None:
    """Raise for the first of ``arguments`` that is set: only NPUs have the mode that it selects."""
    for name, value in arguments.items():
        empty = value is None or (isinstance(value, (list, tuple)) and len(value) == 0)
        need(empty, name, "is not supported off the NPU; leave it out")


def need_only(argument: str, value: int | None, *allowed: int | None) -> None:
    """Raise unless ``value`` of ``argument`` is one of ``allowed``, the modes that run off the NPU."""
    if value not in allowed:
        need(False, argument, "is {}; off the NPU it must be {}", value, ", ".join(map(str, allowed)))


Dtypes = tuple["torch.dtype", ...]


def need_tensor(argument: str, value: object) -> None:
    """Raise unless ``value`` of ``argument`` is a tensor."""
    need(hasattr(value, "is_floating_point"), argument, "is a {}; it must be a tensor", type(value).__name__)


def need_shape(argument: str, tensor: torch.Tensor, *shapes: tuple[int, ...], dtypes: Dtypes | None = None) -> None:
    """Raise unless ``tensor`` of ``argument`` has one of ``shapes``, as ``(T, K)``, and one of ``dtypes``."""
    need_tensor(argument, tensor)
    if tuple(tensor.shape) not in shapes:
        need(False, argument, "is {}; it must be {}", tensor.shape, " or ".join(str(tuple(shape)) for shape in shapes))
    need_dtype(argument, tensor, *(dtypes or (tensor.dtype,)))


def need_dtype(argument: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise unless ``tensor`` of ``argument``, of any shape ``(...,)``, has one of ``dtypes``."""
    need_tensor(argument, tensor)
    if tensor.dtype not in dtypes:
        need(False, argument, "is {}; it must be {}", tensor.dtype, " or ".join(map(_name, dtypes)))


def need_dims(argument: str, tensor: torch.Tensor, *dims: int, dtypes: Dtypes | None = None) -> None:
    """Raise unless ``tensor`` of ``argument`` has ``dims`` dimensions, 2 for ``(T, K)``, and one of ``dtypes``."""
    need_tensor(argument, tensor)
    if tensor.dim() not in dims:
        need(False, argument, "is {}; it must be {}", tensor.shape, " or ".join(f"{count}-D" for count in dims))
    need_dtype(argument, tensor, *(dtypes or (tensor.dtype,)))


def need_one_of(argument: str, value: object, names: Iterable[str]) -> None:
    """Raise unless ``value`` of ``argument`` is one of ``names``."""
    if value not in (listed := list(names)):
        need(False, argument, "is {!r}; need one of {}", value, ", ".join(filter(None, listed)))


def unknown_argument(function: Callable[..., object], given: Iterable[str]) -> TypeError | None:
    """The error for the first name of ``given`` that is no argument of ``function``, with the nearest one that is."""
    return unknown_name(function.__qualname__, list(inspect.signature(function).parameters), given)


def unknown_name(function: str, names: Sequence[str], given: Iterable[str]) -> TypeError | None:
    """The same of the name of ``function`` and the ``names`` of its arguments, for those ``given``."""
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    return None


def with_right_names(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, where the TypeError that it raises about a misspelt argument has the nearest right name."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            unknown = unknown_argument(function, kwargs) if _misfit(error) else None
            if unknown is None:
                raise
            raise unknown from None

    return run


def with_signature_of(
    model: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Makes a method take what ``model``, a method too, takes: a signature that several classes share stands once.

    The method names those arguments that it uses, or takes all as ``**keywords``; it gets them by name, with model's
    defaults, and raises TypeError as model does. Without a docstring it has model's. This decorator is the outermost.
    """
    signature = inspect.signature(model)
    _, *known = signature.parameters.values()
    names = {parameter.name for parameter in known}
    positional = [parameter.name for parameter in known if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    defaults = {parameter.name: parameter.default for parameter in known if parameter.default is not parameter.empty}

    def decorate(function: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        _, *used = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in used)
        wanted = names if takes_all else {parameter.name for parameter in used}

        @functools.wraps(function)
        def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            # By hand: signature.bind takes ten times as long.
            placed = dict(zip(positional, args, strict=False))
            given = {**defaults, **placed, **kwargs}
            if len(args) > len(positional) or given.keys() != names or not placed.keys().isdisjoint(kwargs):
                raise unknown_argument(run, kwargs) or _unbound(run, signature, self, *args, **kwargs)
            return function(self, **{name: given[name] for name in wanted})

        run.__doc__ = function.__doc__ or model.__doc__
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


def _unbound(function: Callable[..., object], signature: inspect.Signature, *args: Any, **kwargs: Any) -> TypeError:
    """The error of a call that does not fit a signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return TypeError(f"{function.__qualname__}() {error}")
    raise AssertionError(f"{function.__qualname__}() fits its signature")


def _misfit(error: Exception) -> bool:
    """True if a wrapper's call did not fit the signature: the function has not begun."""
    return error.__traceback__ is None or error.__traceback__.tb_next is None


def with_typed_errors(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which raises ArgumentError for what Python or a library says of arguments that no rule looks at.

    Our own errors, those classes that torch has made itself, and a call that does not fit the signature stay,
    a misspelt argument with the nearest right name.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            name = function.__qualname__
            if name.startswith("_") and args and hasattr(type(args[0]), function.__name__):
                # A method of a private base: callers know the class of the object.
                name = f"{type(args[0]).__name__}.{function.__name__}"
            if _misfit(error):
                raise unknown_name(name, list(inspect.signature(function).parameters), kwargs) or error from None
            if isinstance(error, AscendMoeError) or type(error).__module__.startswith("torch"):
                raise
            name = name.removesuffix(".__init__")
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            said = said if len(said) < 200 else said.partition(". ")[0][:200]  # torch explains itself at length
            raise ArgumentError(f"{name} cannot work with these arguments: {said}") from error

    return run


def typed_methods(cls: type[C]) -> type[C]:
    """Gives ``__init__`` and the public methods that a class defines `with_typed_errors`."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, with_typed_errors(value))
    return cls
