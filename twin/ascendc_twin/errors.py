"""Typed errors. A message is one line: what is wrong, in which argument or file, the rule, the fix."""

from __future__ import annotations

from typing import Any


class TwinError(RuntimeError):
    """Base of every error that this package raises on purpose.

    Args:
        message: one line.
        details: further attributes of the error: ``rank=3`` becomes ``error.rank``.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details

    def __getattr__(self, name: str) -> Any:
        # Python calls this for a missing attribute: details are attributes (error.rank, error.finding).
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class ArgumentError(TwinError, ValueError):
    """Raised if an argument breaks a rule.

    Attributes:
        argument: name of the argument, or of a kernel's parameter.
    """


def need(fulfilled: bool, text: str, argument: str) -> None:
    """Raise ArgumentError with this text unless ``fulfilled``."""
    if not fulfilled:
        raise ArgumentError(text, argument=argument)


class LibraryError(TwinError, ImportError):
    """Raised if a library cannot be loaded, was not made by `build`, or is not safe to load from the cache."""


class TwinBuildError(TwinError):
    """Raised if a kernel does not compile for the emulator, or a source has no kernel, or there is no compiler.

    Attributes (only if the compiler failed):
        source: the file.
        command: the compiler's command line.
        output: what the compiler printed.
    """


class TwinFault(TwinError):
    """Raised if the emulator finds a fault in a kernel: a race, a missing wait, an access out of bounds, a hang.

    Attributes:
        kernel: its name.
        rank: the rank that failed.
        finding: class of the finding, for example "race between cores"; "" if the kernel threw another exception.
        seed, policy: arguments of `Kernels.launch` that repeat it with mode="checked"; absent in other modes.
    """
