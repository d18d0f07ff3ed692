"""`ascend-moe doctor`: checks of this machine, as findings with a reason and a fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, WARN, ERROR = "ok", "warn", "error"


@dataclass(frozen=True)
class Finding:
    """Of one topic: what there is; where something is wrong, why that matters and what to do."""

    level: str
    topic: str
    what: str
    why: str = ""
    fix: str = ""


def fine(topic: str, what: str) -> Finding:
    """All is well, or this is worth knowing."""
    return Finding(OK, topic, what)


def warn(topic: str, what: str, why: str, fix: str) -> Finding:
    """It may work; one day it may not."""
    return Finding(WARN, topic, what, why, fix)


def error(topic: str, what: str, why: str, fix: str) -> Finding:
    """It cannot work like this."""
    return Finding(ERROR, topic, what, why, fix)


def text(findings: Sequence[Finding]) -> str:
    """Lines of plain text, fit for an issue: the worst of each topic cannot be missed."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<5}  {finding.topic:<{width}}  {finding.what}")
        lines += [
            f"{'':<{width + 9}}{name}: {words}"
            for name, words in (("why", finding.why), ("fix", finding.fix))
            if words
        ]
    errors, warnings, good = (sum(one.level == level for one in findings) for level in (ERROR, WARN, OK))
    many = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return "\n".join([*lines, "", f"{many}, {good} ok"])
