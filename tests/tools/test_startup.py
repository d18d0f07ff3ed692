"""`ascend-moe` as a process: what it imports before it works, a pipe that nobody reads, completion in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import commands
import pytest
import torch

import ascend_moe
from ascend_moe import _autoload, cli
from ascend_moe.cli import root

LIGHT = [
    ["--help"],
    ["--version"],
    ["doctor"],
    ["plan"],
    ["plan", "-r", "64", "--json"],
    *([name, "--help"] for name in root.COMMANDS),
]
# In one process, forked before each command: an interpreter of its own for each would take 0.3 s.
FORKS = """
import os, sys
from ascend_moe.cli import main
for words in eval(sys.argv[-1]):
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            main(words)
        except SystemExit as end:
            heavy = [name for name in ("torch", "numpy") if name in sys.modules]
            os._exit(end.code or (9 if heavy else 0))
    _, status = os.wait()
    print(*words, os.waitstatus_to_exitcode(status), flush=True)
"""


def as_command(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a process that the package takes for one of `ascend-moe`."""
    head = f"import sys; sys.orig_argv = ['python', '-m', 'ascend_moe', 'plan']\n{program}"
    return commands.process([sys.executable, "-c", head, *arguments])


def test_help_version_doctor_and_plan_import_no_torch() -> None:
    said = as_command(FORKS, repr(LIGHT)).stdout.splitlines()
    assert said == [f"{' '.join(words)} 0" for words in LIGHT]


FULL = "ascend-moe: the output cannot be written: No space left on device\n"
ENDS = [(f"{words} | true", 141, "") for words in ("--help", "plan --details", "plan --json", "twin")]
ENDS += [(f"{words} >/dev/full", 2, FULL) for words in ("--help", "plan", "plan --json")]  # by rich and print
ENDS += [("plan >&-", 0, ""), ("--nothing", 2, "ascend-moe: No such option: --nothing; see ascend-moe --help\n")]


@pytest.mark.parametrize(("words", "code", "said"), ENDS)
def test_a_command_whose_output_is_lost_ends_without_a_traceback(words: str, code: int, said: str) -> None:
    script = f"{sys.executable} -m ascend_moe {words}; echo ${{PIPESTATUS[0]}}"
    done = commands.process(["bash", "-c", script])
    assert (done.stdout, done.stderr) == (f"{code}\n", said)


@pytest.mark.parametrize(("command", "module"), [("ascendc-twin", "ascendc_twin"), ("ascend-vnpu", "ascend_vnpu")])
def test_a_command_without_typer_says_so(command: str, module: str) -> None:
    script = f"import sys; sys.modules['typer'] = None; import {module}.cli"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, f"{command} needs typer: pip install typer\n")


def test_a_pipe_gets_each_line_at_once_where_the_stream_writes_so() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as read, open(writer, "w", 1, "ascii") as stream:
        os.set_blocking(reader, False)
        piped = cli._checked(stream)
        piped.write("a line, 1 µs\n")
        assert read.read(100) == b"a line, 1 \\xb5s\n"


def test_completion_is_installed_by_one_command(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def bash(script: str) -> list[str]:
        return commands.process(["bash", "--norc", "-c", script], **env).stdout.splitlines()

    assert bash("ascend-moe --install-completion; true")[0].startswith("bash completion installed in ")
    complete = "_ascend_moe_completion ascend-moe; echo ${COMPREPLY[@]}"
    found = bash(
        f"source ~/.bashrc; COMP_WORDS=(ascend-moe p); COMP_CWORD=1; {complete};"
        f"COMP_WORDS=(ascend-moe plan --det); COMP_CWORD=2; {complete}"
    )
    assert found == ["plan predict", "--details"]


def test_every_public_name_can_be_had_in_a_command() -> None:
    found = as_command(
        "import ascend_moe\n"
        "assert 'torch' not in sys.modules and set(ascend_moe.__all__) <= set(dir(ascend_moe))\n"
        "from ascend_moe import MoELayer, LocalCluster\n"
        "import torch\n"
        "torch.ops.ascend_moe.npu_moe_distribute_dispatch_v2\n"
        "print([name for name in ascend_moe.__all__ if getattr(ascend_moe, name, None) is None])\n"
    )
    assert found.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ascend_moe.nothing  # noqa: B018


def test_an_import_in_a_program_registers_the_operators() -> None:
    program = "import ascend_moe, torch; print(torch.ops.ascend_moe.npu_moe_distribute_combine_v2)"
    words = [sys.executable, "-c", program, "ascend-moe", "plan"]  # words of a program do not make it the command
    assert "npu_moe_distribute_combine_v2" in commands.process(words).stdout


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["python", "/usr/bin/ascend-moe", "plan", "-r", "2"], "plan"),
        (["python3.11", "-X", "dev", "-m", "ascend_moe", "doctor"], "doctor"),
        (["python", "-u", "/venv/bin/ascend-moe"], ""),
        (["python", "serve.py", "ascend-moe", "doctor"], None),
        (["python", "-m", "torch.distributed.run", "-m", "ascend_moe"], None),
        (["python", "-c", "import ascend_moe", "ascend_moe", "plan"], None),
        (["python"], None),
    ],
)
def test_the_command_of_a_process(words: list[str], command: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    assert _autoload.command() == command


def test_words_for_options_are_those_of_the_modules() -> None:
    from ascend_moe import _text, call, explore, predict
    from ascend_moe.bench import cases
    from ascend_moe.comm import registered
    from ascend_moe.native import plans
    from ascend_moe.predict import roundtrip
    from ascend_moe.reference.cases import DTYPES

    assert registered.DTYPES == DTYPES == {name: getattr(torch, full) for name, full in call.DTYPES.items()}
    assert call.ALGORITHMS[1:] == plans.ALGORITHMS[1:]
    assert (tuple(cases.SKEWS), tuple(cases.SWEEPS)) == (_text.SKEWS, _text.SWEEPS)
    assert tuple(predict.ALGORITHMS) == _text.PREDICTED and tuple(roundtrip.PICKS) == _text.PICKS
    assert tuple(explore.POLICIES) == _text.POLICIES and str(explore.Program()) == _text.USUAL_CASE


# Never installed here; an import of one of them shows as an entry of sys.modules or as an ImportError.
SYSTEMS = ("cann_ops_transformer", "deep_ep", "megatron", "mindspeed", "sglang", "torch_npu", "vllm", "vllm_ascend")
ADAPTERS = ("cann_ops_transformer", "deep_ep", "fused_moe", "megatron", "sglang", "vllm", "vllm_ascend")


def test_adapters_import_without_their_systems_and_only_when_asked_for() -> None:
    program = (
        "import importlib, sys, ascend_moe\n"
        "print(*[name for name in sys.modules if name.startswith('ascend_moe.interop')])\n"
        f"for name in {ADAPTERS!r}: importlib.import_module('ascend_moe.interop.' + name)\n"
        f"print(*[name for name in sys.modules if name.partition('.')[0] in {SYSTEMS!r}])\n"
    )
    assert commands.process([sys.executable, "-c", program]).stdout == "\n\n"
