"""Pages have what the code makes of them, and its limits; what docstrings lack is found."""

from __future__ import annotations

import inspect
import random
import re
import sys
from pathlib import Path

import griffe
import pytest
from tiny_checkpoints import tiny

from ascend_moe import errors, foreign
from ascend_moe.checkpoint import load_layer
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import Activation
from ascend_moe.foreign.abi import MAX_ARGUMENTS
from ascend_moe.interop.vllm.quantization import ACTIVATIONS
from ascend_moe.interop.vllm.selection import DEFAULT_MAX_TOKENS
from ascend_moe.timeline.record import DEFAULT_EVENTS
from ascend_moe.vnpu.launch import MAX_DEVICES

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import docs_docstrings
import pages_from_code

pytestmark = pytest.mark.skipif(not pages_from_code.DOCS.is_dir(), reason="not in a source tree")


@pytest.mark.parametrize("name", ["settings.md", "errors.md", "operators.md", "zh/operators.md", "checkpoints.md"])
def test_a_page_has_what_the_code_makes(name: str) -> None:
    path = pages_from_code.DOCS / name
    assert path.read_text() == dict(pages_from_code.pages())[path], "run tools/pages_from_code.py"


def constants(header: str, *names: str) -> list[int]:
    """Numbers of a C++ header; an installed package has none."""
    path = pages_from_code.ROOT / header
    text = path.read_text() if path.is_file() else ""
    return [int(number) for name in names for number in re.findall(rf"\b{name} = (\d+);", text)]


def protocol(*names: str) -> list[int]:
    """Limits of the wire protocol."""
    return constants("op_kernel/protocol/window.h", *(f"kMax{name}" for name in names))


#: A page, a sentence of it with its numbers as groups, and the code's numbers.
NUMBERS = [
    (
        "README.md",
        r"K 1\.\.(\d+) experts a token, H to (\d+) .* BS to (\d+) tokens a rank, E to (\d+) experts, W to (\d+) ranks",
        protocol("TopK", "Hidden", "Batch", "Experts", "World"),
    ),
    (
        "docs/cluster.md",
        r"W to (\d+), H to (\d+), K to (\d+), (\d+) tokens a rank",
        protocol("World", "Hidden", "TopK", "Batch"),
    ),
    (
        "docs/operators.md",
        r"at most (\d+) of each\. .* as all experts together, at most (\d+)\.",
        protocol("SpecialExperts", "TopK"),
    ),
    ("docs/frameworks.md", r"W is at most (\d+), T (\d+), K (\d+)\.", protocol("World", "Batch", "TopK")),
    ("docs/frameworks.md", r"More than (\d+) rows of a rank go by several calls", protocol("Batch")),
    ("docs/frameworks.md", r"up to `max_num_tokens` \((\d+)\) a rank", [DEFAULT_MAX_TOKENS]),
    ("docs/foreign_kernels.md", r"with at most (\d+) parameters", [MAX_ARGUMENTS]),
    ("docs/foreign_kernels.md", r"1 to (\d+) of them\. No cube calls", [foreign.MAX_CORES]),
    ("docs/vnpu.md", r"at most (\d+) devices", [MAX_DEVICES]),
    ("docs/trace.md", r"At most (\d+ \d+) events of 64 bytes", [DEFAULT_EVENTS]),
    ("docs/errors.md", r"its last (\d+) calls", constants("csrc/torch/record.h", "kKept")),
]


def said(page: str, sentence: str) -> list[str]:
    """The groups of a sentence, which the page has once."""
    found = list(re.finditer(sentence, " ".join((pages_from_code.ROOT / page).read_text().split())))
    assert len(found) == 1, f"{page} has {len(found)} sentences of this form"
    return list(found[0].groups())


@pytest.mark.parametrize(("page", "sentence", "numbers"), NUMBERS, ids=lambda value: str(value)[:30])
def test_a_limit_of_a_page_is_the_codes(page: str, sentence: str, numbers: list[int]) -> None:
    assert [int(number.replace(" ", "")) for number in said(page, sentence)] == numbers


def test_the_activations_of_vllms_experts_are_the_codes() -> None:
    (names,) = said("docs/frameworks.md", r"Activations: (.*?), with the limit")
    assert re.findall(r"`(\w+)`", names) == list(ACTIVATIONS)
    with_numbers = [name for name in ("limit", "alpha", "bias") if Activation(ACTIVATIONS["silu"]).has(name)]
    assert with_numbers == ["limit"]


def test_every_error_stands_in_a_table() -> None:
    """But for the bases, which are never raised themselves."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    defined = {value.__name__ for value in classes if value.__module__ == errors.__name__}
    listed = {name for names in pages_from_code.ERRORS.values() for name in names}
    assert listed == defined - {"AscendMoeError", "CommError"}


def test_a_docstring_that_says_no_remedy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.PeerLost, "__doc__", "Raised where a rank has gone.")
    with pytest.raises(ValueError, match="the docstring of PeerLost does not say"):
        pages_from_code.errors_table("fatal errors")


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/errors.md has no <!-- begin generated: errors of one rank -->"):
        pages_from_code.filled("errors.md", "# Errors\n")


# ---- docstrings of public names


def described(names: list[str]) -> str:
    return "Args:\n" + "".join(f"        {name}: a number.\n" for name in names)


def test_an_argument_is_described_here_or_in_the_docstring_that_is_referred_to() -> None:
    """200 drawn pairs of functions; the second describes its arguments, or refers to the first, or to none."""
    draw = random.Random(48)
    for _ in range(200):
        names = draw.sample(["alpha", "beta", "gamma", "delta"], draw.randint(1, 4))
        told = [name for name in names if draw.random() < 0.6]
        target = draw.choice(["", "ascend_moe.first", "ascend_moe.nowhere"])
        own = f"The arguments are those of `{target}`." if target else described(told)
        code = "".join(
            f'def {name}({", ".join(names)}):\n    """Does something.\n\n    {text}\n    """\n'
            for name, text in (("first", described(told)), ("second", own))
        )
        with griffe.temporary_visited_package(
            "ascend_moe", {"__init__.py": code}, extensions=griffe.Extensions(docs_docstrings.Docstrings())
        ) as package:
            lacking = docs_docstrings.left_out(package["second"])
            shown = package["second"].docstring.parse("google")
        known = told if target != "ascend_moe.nowhere" else []
        assert lacking == [f"argument {name}" for name in names if name not in known], code
        listed = [each.name for part in shown if part.kind.value == "parameters" for each in part.value]
        assert listed == known, code


@pytest.mark.parametrize("key", pages_from_code.PUBLISHED)
def test_every_published_value_is_read_or_refused_by_name(key: str, tmp_path: Path) -> None:
    """In files of five formats: a value that is read with some format loads in one of them."""
    for value in pages_from_code.PUBLISHED[key]:
        loaded = 0
        for kind in ("int4 in bytes by group", "int8 by tensor", "fp8 by block", "fp8 by channel", "int4 by group"):
            made = tiny(kind).changed()
            said = made.config["quantization_config"]
            group = said["config_groups"]["group_0"]
            (said if key == "format" else group["weights"])[key] = value
            try:
                load_layer(made.write(tmp_path), 0)
                loaded += 1
            except ArgumentError as error:
                named = key.removeprefix("num_") in str(error) and repr(value) in str(error)
                assert named or pages_from_code.is_read(key, value)
        assert bool(loaded) == pages_from_code.is_read(key, value) or str(value).startswith("mx"), value
