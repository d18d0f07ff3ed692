"""Typed errors. A message is one line: what is wrong, in which argument or file, the rule, the fix."""

from __future__ import annotations

from typing import Any


class TwinError(RuntimeError):
    """Base of every error that this package raises on purpose.

    Args:
        message: the one line.
        details: what becomes the error's attributes, by name.
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
    """Raised where an argument breaks a rule.

    Attributes:
        argument: its name.
    """


class LibraryError(TwinError, ImportError):
    """Raised where a library of kernels cannot be opened, or was not made by `build`."""


class TwinBuildError(TwinError):
    """Raised where a kernel does not compile for the emulator.

    Attributes:
        source: the file.
        command: the compiler's command line.
        output: what the compiler printed.
    """


class TwinFault(TwinError):
    """Raised where the emulator finds a fault in a kernel: a race, a missing wait, an access out of bounds, a hang.

    Attributes:
        kernel: its name.
        rank: the rank that failed.
        finding: the class of the finding, for example "race between cores".
        seed, policy: of the schedule that shows it again; checked engine only.
    """
