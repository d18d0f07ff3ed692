"""The application that all commands hang on. A command's module is imported when that command runs."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ascend_moe._text import installed_version
from ascend_moe.cli.commands import COMMANDS
from ascend_moe.errors import AscendMoeError

# click's, or that of typer's own copy of click.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _in_one_line(error: Any, words: list[str]) -> str:
    """The option and its value as they were given, and what is wrong with them."""
    options = [*getattr(error.param, "opts", []), *getattr(error.param, "secondary_opts", [])] if _is_bad(error) else []
    given = [at for at, word in enumerate(words) if word.partition("=")[0] in options]
    if not given:
        return " ".join(str(error.format_message()).split()).rstrip(".")
    name, same_word, value = words[given[-1]].partition("=")
    value = value if same_word else next(iter(words[given[-1] + 1 :]), "")
    message = " ".join(str(error.message).split()).rstrip(".")
    return f"'{name}': {message}" if value in message else f"'{name}' {value}: {message}"


def _is_bad(error: Any) -> bool:
    return isinstance(error, typer.BadParameter) and bool(error.message)


def _without_types(command: Any, ctx: Any) -> None:
    """Removes "<bool>", as typer from 0.29 on writes it, from the help of flags: they take no value."""
    for option in command.get_params(ctx):
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _without_types(inner, ctx)


class _Commands(TyperGroup):
    """The help lists commands by their line in COMMANDS; to run, a command's own application is loaded."""

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
        ctx.obj = list(rest)
        module = str(name).replace("-", "_")
        application: typer.Typer = importlib.import_module(f"ascend_moe.cli.{module}").app
        application._add_completion = False  # its scripts would complete a program of the command's name
        command = typer.main.get_command(application)
        _without_types(command, ctx)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Errors of this package and wrong options become one line on stderr, and exit code 2; Ctrl-C one, and 130."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            command = (
                f"ascend-moe {ctx.invoked_subcommand or ''}".rstrip() if error.ctx is None else error.ctx.command_path
            )
            print(f"{command}: {_in_one_line(error, ctx.obj or [])}; see {command} --help", file=sys.stderr)
            raise typer.Exit(2) from None
        except AscendMoeError as error:
            print(f"ascend-moe {ctx.invoked_subcommand}: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print(f"ascend-moe {ctx.invoked_subcommand}: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def version() -> str:
    """Returns the version of the installed package."""
    return installed_version("ascend_moe") or "(a source tree, not installed)"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ascend_moe {version()}")
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False) -> None:
    """MoE expert parallelism for Ascend, on any machine."""
