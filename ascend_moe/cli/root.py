"""The typer application of all commands. A command's module is imported when that command runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ascend_moe._text import installed_version
from ascend_moe.errors import AscendMoeError

#: Command -> its line in the help, in the order of use.
COMMANDS = {
    "run": "Run an MoE layer over EP ranks of this machine on real text, and check every result.",
    "doctor": "Check this machine: versions, variables, devices, memory. Each problem is shown with its fix.",
    "hang": "Show which rank the others wait for: op, epoch and phase of every rank of this machine.",
    "plan": "Print what a configuration needs: window, HCCL_BUFFSIZE, UB, tiling, limits.",
    "validate": "Compare dispatch and combine with the reference, on an NPU, a virtual NPU or the CPU.",
    "bench": "Time dispatch and combine against torch.distributed, MPI and the machine's limit.",
    "predict": "Predict times on NPUs with a model, and print its assumptions.",
    "trace": "Show where the time of dispatch and combine goes, measured or predicted.",
    "explore": "Search many schedules for races, missing synchronization, hangs and wrong results.",
    "vnpu": "Run a command with torch_npu on a virtual NPU of this machine.",
    "shim": "Run code written for torch_npu on CPU tensors, without torch_npu.",
    "twin": "Build, run and check your own AscendC kernels on the CPU.",
}
#: Arguments of the modules that an option of another name sets.
_OPTION_OF = {
    "algorithm": "comm_alg",
    "bs": "batch",
    "directory": "checkpoint",
    "hidden_size": "hidden",
    "num_experts": "experts",
    "repeat": "iterations",
    "top_k": "topk",
    "window_mib": "window",
}
# click's class, or that of typer's own copy of click
_UsageError: Any = typer.BadParameter.__mro__[1]


def _in_one_line(error: Any, words: list[str]) -> str:
    """The option and its value as given, and the problem."""
    is_bad = isinstance(error, typer.BadParameter) and bool(error.message)
    options = [*getattr(error.param, "opts", []), *getattr(error.param, "secondary_opts", [])] if is_bad else []
    given = [at for at, word in enumerate(words) if word.partition("=")[0] in options]
    if not given:
        return " ".join(str(error.format_message()).split()).rstrip(".")
    name, same_word, value = words[given[-1]].partition("=")
    value = value if same_word else next(iter(words[given[-1] + 1 :]), "")
    message = " ".join(str(error.message).split()).rstrip(".")
    return f"'{name}': {message}" if value in message else f"'{name}' {value}: {message}"


def _about_option(error: AscendMoeError, command: Any) -> str:
    """The text of an error, about the option that sets its argument if the command has one."""
    argument, text = str(getattr(error, "argument", "")), str(error).removeprefix("explore: ")
    option = "--" + _OPTION_OF.get(argument, argument).replace("_", "-")
    if not any(option in each.opts for each in getattr(command, "params", ())):
        return text
    return f"{option} {text.removeprefix(f'{argument} ')}" if text.startswith(f"{argument} ") else f"{option}: {text}"


def _without_types(command: Any, ctx: Any) -> None:
    """Remove "<bool>", which typer 0.29 and later write, from the help of flags."""
    for option in command.get_params(ctx):
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _without_types(inner, ctx)


def application(command: str) -> typer.Typer:
    """Import a command's module and return its typer application."""
    if command == "vnpu":
        from ascend_vnpu.cli import app
    elif command == "twin":
        from ascendc_twin.cli import app
    else:
        app = importlib.import_module(f"ascend_moe.cli.{command}").app
    return app


class _Commands(TyperGroup):
    """Commands listed from COMMANDS; a command's own application is loaded when it runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        line = COMMANDS.get(cmd_name)
        return None if line is None else TyperCommand(cmd_name, help=line, short_help=line)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _without_types(self, ctx)
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        app = application(str(name))
        app._add_completion = False  # its scripts would complete a program named like the command
        command = typer.main.get_command(app)
        _without_types(command, ctx)
        ctx.obj = command, list(rest)
        return name, command, rest

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with _errors_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _errors_in_one_line(ctx):
            return super().invoke(ctx)


@contextmanager
def _errors_in_one_line(ctx: Any) -> Iterator[None]:
    """Print errors of this package and wrong options as one line with exit code 2; Ctrl-C exits with 130."""
    code = 2
    try:
        yield
        return
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        command = _words(ctx) if error.ctx is None else error.ctx.command_path
        text = f"{command}: {_in_one_line(error, ctx.obj[1] if ctx.obj else [])}; see {command} --help"
    except AscendMoeError as error:
        text = f"{_words(ctx)}: {_about_option(error, ctx.obj and ctx.obj[0])}"
    except KeyboardInterrupt:
        text, code = f"{_words(ctx)}: interrupted", 130
    print(text, file=sys.stderr)
    raise typer.Exit(code)


def _words(ctx: Any) -> str:
    return f"ascend-moe {ctx.invoked_subcommand or ''}".rstrip()


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def version() -> str:
    """Return the version of the installed package, or "(a source tree, not installed)"."""
    return installed_version("ascend_moe") or "(a source tree, not installed)"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ascend_moe {version()}")
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False) -> None:
    """Expert-parallel dispatch and combine for MoE models on Ascend NPUs; runs on any machine."""
