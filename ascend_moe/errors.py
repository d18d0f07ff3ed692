"""Typed errors. A message is one line: the operation, the argument and rank, the rule, the fix.

There are three kinds:

* local: ``ArgumentError`` and its subclasses, ``CommBusy`` and ``CommClosed``. One rank raises it before it
  touches its window. A corrected call works.
* collective: ``InvalidExpertId``, ``RoutingOverflow`` and ``ConfigMismatch``, and ``ArgumentError`` for values in
  ep_send_counts or assist_info_for_combine: every rank raises the same error. ``RoutingMismatch`` is raised by
  the rank that detects it. The communicator stays usable.
* fatal: ``CommError`` and its subclasses ``PeerLost``, ``CommTimeout``, ``CorruptStatus``. The communicator stays
  in the failed state until it is closed and opened again; on an NPU, until its process group is recreated.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


class AscendMoeError(RuntimeError):
    """Base class of this package's errors. ``others``: errors of other ranks, by rank, if a LocalCluster raised it.

    Args:
        message: one line of text.
        details: further attributes, such as ``rank``. One that a class lists is absent (AttributeError) if unknown.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        self.others: dict[int, BaseException] = {}

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only: error.rank, error.field and so on are details.
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class ArgumentError(AscendMoeError, ValueError):
    """Raised where an argument breaks a rule: shape, dtype, range or an unsupported mode.

    Every rank raises it where combine received an ``ep_send_counts`` or ``assist_info_for_combine`` that dispatch
    cannot have returned: pass combine the tensors from dispatch; ``comm_alg="direct"`` also needs dispatch's order.

    Attributes:
        argument: the argument's name.
        rank: the rank that passed it.

    What to do: the message contains the rule and the value.
    """


class WindowTooSmall(ArgumentError):
    """Raised where the window cannot hold the rows that a call may send, or a tensor of ``window_empty``.

    Attributes:
        needed_mib: the required size in MiB.
        variable: only from ``window_empty``: the environment variable that sets the size of its memory.

    What to do: export the variable and value in the message on all ranks before the group's first op.
    """


class WindowTensorError(ArgumentError):
    """Raised where a tensor of ``window_empty`` was used twice, or belongs to another window.

    Attributes:
        generation: the serial number of the tensor's buffer.
        epoch: the number of the op that consumed the tensor, or 0 if none did.

    What to do: allocate a new one for every combine (docs/layers.md).
    """


class CommBusy(AscendMoeError):
    """Raised where close times out on an op that another thread runs on the communicator, which stays open.

    Attributes:
        rank: the rank that called close.

    What to do: close it after the op has returned or raised.
    """


class CommClosed(AscendMoeError):
    """Raised where another thread closed an op's communicator, or it was closed before an in-flight op was finished.

    Attributes:
        rank: the rank that raises the error.

    What to do: finish in-flight ops before close; the group's next op opens new windows.
    """


class InvalidExpertId(AscendMoeError, ValueError):
    """Raised where an active expert id is neither -1 nor in 0..E-1.

    Attributes:
        rank, token, k: its position: row ``token``, column ``k`` of the expert ids of ``rank``.
        expert_id: the id. Ids of special experts are valid too.

    What to do: check the router of that rank. Other ranks report an int64 id that overflows int32 as
    "2147483647 or more".
    """


class RoutingOverflow(AscendMoeError):
    """Raised where a rank sends one owner more rows than maxBS · min(K, L), the capacity of the window.

    Attributes:
        rank, owner: the sending rank and the rank that owns the experts; both the owner if an argument sets the limit.
        rows, capacity: the number of rows and the limit.

    What to do: remove duplicate ids, or raise ``global_bs``.
    """


class RoutingMismatch(AscendMoeError):
    """Raised where combine's ids, mask or counts do not match the rows of its dispatch.

    The detecting rank raises it; ids permuted within equal counts are detected with ``ASCEND_MOE_CHECK_ROUTING=1``.

    Attributes:
        rank, expert: the rank whose rows differ, and their expert; with "hierarchy" a server instead of an expert.
        ours, theirs: the number of rows that ``rank`` expects, and the number that it finds.
        token, k: instead of ours and theirs if the row of a routed token is missing.

    What to do: pass combine the arguments and results of its dispatch.
    """


class ConfigMismatch(AscendMoeError):
    """Raised where ranks called with different H, K, E, BS, dtype, mode or op, or opened a group with other settings.

    Attributes:
        field: the name of the value that differs.
        rank: the other rank.
        ours, theirs: the values on the rank that detected the difference and on ``rank``.

    What to do: make the two values in the message equal.
    """


class CommError(AscendMoeError):
    """Fatal error of a communicator, which must be closed.

    Attributes:
        rank: the rank that caused it; None or absent if unknown.
        reporter: the rank that detected it. Only from dispatch and combine, not from opening or shrinking a group.
        phase: the op, or the step of opening or closing the group.
        level: only with ``comm_alg="hierarchy"`` between servers: 1 if the reporter was waiting for rows it forwards,
            2 if it was waiting for rows that others forward to it.
    """


class PeerLost(CommError):
    """Raised where a rank's process has died or closed its communicator; detected within 2 s on a CPU.

    Attributes:
        rank: the lost rank.
        reporter, phase, level: as in ``CommError``.

    What to do: find out why that rank ended.
    """


class CommTimeout(CommError):
    """Raised where a rank did not arrive within ``ASCEND_MOE_TIMEOUT_S``.

    Attributes:
        rank: the missing rank.
        reporter, phase, level: as in ``CommError``.

    What to do: the message reports what that rank was last doing, and whether it is in an op of the group. Check
    that every rank calls the same ops in the same order.
    """


class CorruptStatus(CommError):
    """Raised where a status block contains a value that no rank can have written in this epoch.

    Attributes:
        rank: the rank whose block is corrupt.
        reporter, phase, level: as in ``CommError``.

    What to do: check whether another library writes into the window of the same communicator.
    """


class LibraryError(AscendMoeError, ImportError):
    """Raised where a native library is missing, does not load, or was built from other sources.

    What to do: run the build command in the message.
    """


class KernelFault(AscendMoeError):
    """Raised where the twin (AscendC emulator) stopped a kernel that broke a hardware rule: bounds, alignment, races.

    Attributes:
        rank: the rank that ran the kernel; absent for third-party kernels.

    What to do: the message contains file and line (docs/twin.md).
    """


class ReferenceMismatch(AscendMoeError):
    """Raised where a step of a layer differs from the reference (`ascend_moe.compare`), on every rank.

    Attributes:
        stage: x, ids, scales, dispatch, parameters, experts or combine.
        rank: the rank whose tensor is wrong.
        token, source: the first wrong token and the rank that it comes from.
        expert, element: the expert of that token, and the first wrong element of the row.
        expected, got: the values of that element.

    What to do: the stage and rank say where to look; earlier stages are right on all ranks.
    """


# ---- rules of arguments


def need(fulfilled: bool, argument: str, rule: str, *values: object) -> None:
    """Raise ``ArgumentError`` with the message "{argument} {rule}" unless ``fulfilled``.

    ``values`` fill the ``{}`` fields of ``rule``, tensors as shape and dtype. They are formatted only on failure, since
    formatting costs time and makes torch.compile specialize on each size in the text.
    """
    if not fulfilled:
        text = rule.format(*map(_shown, values)) if values else rule
        raise ArgumentError(f"{argument} {text}", argument=argument)


def need_equal(everyone: Sequence[Mapping[str, object]], rank: int) -> None:
    """Raise ``ConfigMismatch`` unless ``everyone``, by rank the values by name, equals those of this ``rank``."""
    for field, ours in everyone[rank].items():
        for other, values in enumerate(everyone):
            theirs = values[field]
            if theirs != ours:
                text = (
                    f"{field} is {ours} on rank {rank} and {theirs} on rank {other}; it must be the same on all ranks"
                )
                raise ConfigMismatch(text, field=field, rank=other, ours=ours, theirs=theirs)


def _shown(value: Any) -> object:
    """Return the form of a value in messages: shape and dtype of a tensor, a tuple for a ``torch.Size``."""
    if isinstance(value, (int, float, str, list, tuple, type(None))):
        return tuple(value) if isinstance(value, tuple) else value
    is_tensor = hasattr(value, "is_floating_point") and hasattr(value, "shape")
    return f"{tuple(value.shape)} {_name(value.dtype)}" if is_tensor else value


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def need_unset(**arguments: object) -> None:
    """Raise ArgumentError for the first of ``arguments`` that is set (not None, () or []): only NPUs support it."""
    for name, value in arguments.items():
        empty = value is None or (isinstance(value, (list, tuple)) and len(value) == 0)
        need(empty, name, "is not supported off the NPU; leave it out")


def need_only(argument: str, value: int | None, *allowed: int | None) -> None:
    """Raise ArgumentError unless ``value`` is one of ``allowed``, the values of ``argument`` supported off the NPU."""
    if value not in allowed:
        need(False, argument, "is {}; off the NPU it must be {}", value, ", ".join(map(str, allowed)))


Dtypes = tuple["torch.dtype", ...]


def need_tensor(argument: str, value: object) -> None:
    """Raise ArgumentError unless the ``value`` of ``argument`` is a tensor."""
    need(hasattr(value, "is_floating_point"), argument, "is a {}; it must be a tensor", type(value).__name__)


def need_shape(argument: str, tensor: torch.Tensor, *shapes: tuple[int, ...], dtypes: Dtypes | None = None) -> None:
    """Raise ArgumentError unless ``tensor`` (``argument``) has one of ``shapes``, as ``(T, K)``.

    Its dtype must be one of ``dtypes``; None: any dtype.
    """
    need_tensor(argument, tensor)
    if tuple(tensor.shape) not in shapes:
        known = dict.fromkeys(map(tuple, shapes))  # each once
        need(False, argument, "is {}; it must be {}", tensor.shape, " or ".join(map(str, known)))
    need_dtype(argument, tensor, *(dtypes or (tensor.dtype,)))


def need_dtype(argument: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise ArgumentError unless ``tensor``, the value of ``argument``, has one of ``dtypes``; any shape ``(...,)``."""
    need_tensor(argument, tensor)
    if tensor.dtype not in dtypes:
        need(False, argument, "is {}; it must be {}", tensor.dtype, " or ".join(map(_name, dtypes)))


def need_dims(argument: str, tensor: torch.Tensor, *dims: int, dtypes: Dtypes | None = None) -> None:
    """Raise ArgumentError unless ``tensor`` (``argument``) is ``dims``-D, 2 for ``(T, K)``; ``dtypes``: None: any."""
    need_tensor(argument, tensor)
    if tensor.dim() not in dims:
        need(False, argument, "is {}; it must be {}", tensor.shape, " or ".join(f"{count}-D" for count in dims))
    need_dtype(argument, tensor, *(dtypes or (tensor.dtype,)))


def need_one_of(argument: str, value: object, names: Iterable[str]) -> None:
    """Raise ArgumentError unless the ``value`` of ``argument`` is one of ``names``."""
    if value not in (listed := list(names)):
        need(False, argument, "is {!r}; need one of {}", value, ", ".join(filter(None, listed)))


def unknown_argument(function: Callable[..., object], given: Iterable[str]) -> TypeError | None:
    """Return the TypeError of a call of ``function`` with keywords ``given`` if one is no parameter, else None."""
    return unknown_name(function.__qualname__, list(inspect.signature(function).parameters), given)


def unknown_name(function: str, names: Sequence[str], given: Iterable[str]) -> TypeError | None:
    """Return `unknown_argument` of ``given`` for a function's name and its parameters' ``names``."""
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            error = TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
            error.of_a_call = True  # type: ignore[attr-defined]  # `with_typed_errors` does not convert it
            return error
    return None


def with_right_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call of ``function`` with a misspelled keyword raises a TypeError that suggests the nearest name."""

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
    """Return a decorator that gives a method the signature of the method ``model``; subclasses then need not repeat it.

    The method itself declares only the arguments it uses, or ``**keywords`` for all. It receives them by name, with the
    model's defaults for those that the caller omits; a call that does not fit raises TypeError. A method without a
    docstring inherits the model's. This must be the outermost decorator.
    """
    return with_signature_like(model)


def with_signature_like(
    model: Callable[..., object], *, without: str = "", **more: Any
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return the decorator of `with_signature_of`, for ``model``'s signature with some arguments removed and added.

    ``without``: blank-separated names of arguments to remove. ``more``: arguments to append, with their defaults. The
    method raises TypeError for a call that does not fit.
    """
    signature, named = inspect.signature(model), inspect.Parameter.POSITIONAL_OR_KEYWORD
    first, *known = (each for each in signature.parameters.values() if each.name not in without.split())
    known += [inspect.Parameter(name, named, default=default) for name, default in more.items()]
    signature = signature.replace(parameters=[first, *known])
    names = {parameter.name for parameter in known}
    positional = [parameter.name for parameter in known if parameter.kind is named]
    defaults = {parameter.name: parameter.default for parameter in known if parameter.default is not parameter.empty}

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        _, *used = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in used)
        wanted = names if takes_all else {parameter.name for parameter in used}

        @functools.wraps(function)
        def run(self: Any, /, *args: Any, **kwargs: Any) -> R:
            # signature.bind takes ten times as long.
            placed = dict(zip(positional, args, strict=False))
            given = {**defaults, **placed, **kwargs}
            if len(args) > len(positional) or given.keys() != names or not placed.keys().isdisjoint(kwargs):
                raise unknown_argument(run, kwargs) or _unbound(run, signature, self, *args, **kwargs)
            return function(self, **{name: given[name] for name in wanted})

        run.__doc__ = function.__doc__ or model.__doc__
        returned = inspect.signature(function).return_annotation
        run.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return run

    return decorate


def _unbound(function: Callable[..., object], signature: inspect.Signature, *args: Any, **kwargs: Any) -> TypeError:
    """Return the error of a call that does not fit a signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return TypeError(f"{function.__qualname__}() {error}")
    raise AssertionError(f"{function.__qualname__}() fits its signature")


def _misfit(error: Exception) -> bool:
    """Return whether a call did not fit the wrapped function's signature: the function was not entered."""
    return error.__traceback__ is None or error.__traceback__.tb_next is None


def with_typed_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: convert exceptions of ``function`` to ArgumentError, with the original as the cause.

    Errors of this package and of torch's own classes are unchanged. A call that does not fit the signature still raises
    TypeError, which suggests the nearest name for a misspelled keyword.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            name = function.__qualname__
            if name.startswith("_") and args and hasattr(type(args[0]), function.__name__):
                # A method of a private base class: name the class of the object.
                name = f"{type(args[0]).__name__}.{function.__name__}"
            if _misfit(error):
                raise unknown_name(name, list(inspect.signature(function).parameters), kwargs) or error from None
            known = isinstance(error, AscendMoeError) or hasattr(error, "of_a_call")
            if known or type(error).__module__.startswith("torch"):
                raise
            name = name.removesuffix(".__init__")
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            said = said if len(said) < 200 else said.partition(". ")[0][:200]  # torch's texts can be long
            raise ArgumentError(f"{name} cannot work with these arguments: {said}") from error

    return run


def typed_methods(cls: type[C]) -> type[C]:
    """Class decorator: apply `with_typed_errors` to ``__init__`` and the public methods of a class."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, with_typed_errors(value))
    return cls
