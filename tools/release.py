#!/usr/bin/env python3
"""Makes the files of a release out of the commit that is checked out, and tries them. It uploads nothing.

    make release VERSION=1.2.0rc1     [PROJECT_URL=https://host/owner/ascend_moe] [RELEASE_TESTS=tiny|none]

The version stands in pyproject.toml, the first section of CHANGELOG.md is the release's. In an export of the commit
both get the version and the day of the commit; the sdist is made there, and both wheels are built from the sdist.
What dist/VERSION holds when every check has passed:

    ascend_moe-VERSION.tar.gz          the sdist
    ascend_moe-VERSION-py3-none-*.whl  for x86-64 and for aarch64, with every engine and the virtual NPU
    CHANGELOG.md                       the release's section
    version.patch                      what to commit, so that the tag has version and address; empty when it has them
    built_with.txt                     commit, compilers and tools: with the same ones every file has the same bytes
    SHA256SUMS

A second run of the same commit compares its sums with those that are there. Exit code 1: a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version as version_of
from pathlib import Path

import translations
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "release"
TESTS = {"test": ["-n", "2", "-m", "not npu and not nightly and not mutants"], "tiny": ["-q", "test_tiny.py"]}

READMES = ("README.md", "README.zh.md")

# The system that the wheels run on at least: Ubuntu 22.04, Debian 12, openEuler 24.03. Newest symbol versions there.
PLATFORM = "manylinux_2_35"
NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (11, 0)}
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
# Programs, and Debian's packages of them.
NEEDED = {
    "g++": "g++",
    "readelf": "binutils",
    "dpkg-deb": "dpkg",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "debootstrap": "debootstrap",
}

# The aarch64 wheel is tried in Debian's Python, with the oldest torch that the package takes: its aarch64 wheel is for
# CPUs, and nothing of it is installed but what test_tiny.py imports.
DEBIAN, DEBIAN_PYTHON, EMULATED_TORCH = "bookworm", "3.11", "torch==2.10.0"
OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions", "setuptools")
OF_TINY = ("numpy", "typer", "rich", "pytest", "pytest-timeout")


class ReleaseError(Exception):
    """A check failed, or a step's program; one line, or the end of that program's output."""


# ---- the texts of a release ----


def normal(version: str) -> str:
    """Returns the version as it is; refuses one that an index would write in another way."""
    with contextlib.suppress(InvalidVersion):
        if str(Version(version)) == version:
            return version
    raise ReleaseError(f"VERSION={version} is no version as PEP 440 writes it: take for example 1.2.0 or 1.2.0rc1")


def with_version(pyproject: str, version: str) -> str:
    return re.sub(r'^version = ".*"$', f'version = "{version}"', pyproject, count=1, flags=re.MULTILINE)


def with_urls(pyproject: str, url: str) -> str:
    """Fills [project.urls] from the project's address; those of an earlier release go."""
    pages = {"Homepage": "", "Documentation": "/tree/HEAD/docs", "Changelog": "/blob/HEAD/CHANGELOG.md"}
    pages["Issues"] = "/issues"
    pyproject = re.sub(rf"^({'|'.join(pages)}) = .*\n", "", pyproject, flags=re.MULTILINE)
    lines = "".join(f'{name} = "{url}{page}"\n' for name, page in pages.items())
    return re.sub(r"^\[project\.urls\].*\n", rf"\g<0>{lines}", pyproject, count=1, flags=re.MULTILINE)


def with_date(changelog: str, version: str, day: str) -> str:
    """Gives the first section, which is unreleased or already this release's, its version and day."""
    found = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    title = found[1] if found else "missing"
    if found is None or title.partition(", ")[::2] not in (
        (Version(version).base_version, "unreleased"),
        (version, day),
    ):
        wanted = f"{Version(version).base_version}, unreleased"
        raise ReleaseError(f"CHANGELOG.md's first section is {title!r}, of release {version} it is {wanted!r}")
    return changelog[: found.start()] + f"## {version}, {day}" + changelog[found.end() :]


def first_section(changelog: str) -> str:
    return "## " + changelog.split("\n## ")[1].strip() + "\n"


def with_addresses(readme: str, url: str, version: str) -> str:
    """Makes the README's links into the tree whole, as an index shows it outside the tree."""
    pictures = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\g<1>{url}/raw/v{version}/", readme)
    return re.sub(r"(?<!!)(\[[^][]*\]\()(?!\w+:|#)", rf"\g<1>{url}/blob/v{version}/", pictures)


def with_clone_of(readmes: Mapping[str, str], url: str) -> dict[str, str]:
    """Fills the project's address into the line of README.md and README.zh.md that clones it."""
    filled = {name: re.sub(r"git clone URL( .*?) +# .*", rf"git clone {url}\1", readmes[name]) for name in READMES}
    old, new = map(translations.text_hash, (readmes["README.md"], filled["README.md"]))
    filled["README.zh.md"] = filled["README.zh.md"].replace(f"text {old}", f"text {new}", 1)  # as current as before
    return filled


def patch(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What `git apply` takes to come from the first texts, by path, to the second."""
    lines = []
    for name, text in after.items():
        old, new = before[name].splitlines(keepends=True), text.splitlines(keepends=True)
        lines += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(lines)


# ---- steps ----


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    started = time.monotonic()
    print(f"release: {what}", flush=True)
    yield
    print(f"release: {what}: {time.monotonic() - started:.0f} s", flush=True)


def run(command: list[str | Path], folder: Path, env: Mapping[str, str]) -> str:
    """Returns what a program printed."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, cwd=folder, env=env, text=True, errors="replace", check=False, **both)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise ReleaseError(f"exit code {done.returncode} of {shlex.join(map(str, command))}\n{done.stdout[-5000:]}")
    return str(done.stdout)


def clean_environment() -> dict[str, str]:
    """This process's variables without those that change a compilation, a Python or the package."""
    flags = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "MAKEFLAGS", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in flags}
    prefixes = ("ASCEND", "PYTHON", "SKBUILD", "CMAKE_ARGS", "LD_", "TORCH")
    return {name: value for name, value in kept.items() if not name.startswith(prefixes)} | {
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def check_machine() -> None:
    if platform.machine() != "x86_64":
        raise ReleaseError(
            f"this machine is {platform.machine()}: wheels are made on x86-64, aarch64's by a cross compiler"
        )
    missing = sorted(package for program, package in NEEDED.items() if shutil.which(program) is None)
    if missing:
        raise ReleaseError(f"programs are missing: apt-get install {' '.join(missing)}")
    changed = git("status", "--porcelain").decode()
    if changed:
        raise ReleaseError(f"a release is made of a commit: commit or remove {changed.splitlines()[0][3:]} first")


def export(version: str, url: str) -> tuple[Path, str]:
    """The commit's files with the release's version, and the patch that leads there."""
    tree = WORK / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-x"], cwd=tree, input=git("archive", "HEAD"), check=True)
    day = time.strftime("%Y-%m-%d", time.gmtime(int(git("log", "-1", "--format=%ct"))))
    before = {name: (tree / name).read_text() for name in ("pyproject.toml", "CHANGELOG.md", *READMES)}
    after = before | {"pyproject.toml": with_version(before["pyproject.toml"], version)}
    after["CHANGELOG.md"] = with_date(before["CHANGELOG.md"], version, day)
    if url:
        after |= {"pyproject.toml": with_urls(after["pyproject.toml"], url), **with_clone_of(before, url)}
    for name, text in after.items():
        (tree / name).write_text(text)
    return tree, patch(before, after)


def make_sdist(tree: Path, version: str, url: str, out: Path, env: Mapping[str, str]) -> Path:
    """The sdist, and the folder that it unpacks to."""
    source = WORK / "sdist"
    shutil.copytree(tree, source)
    if url:
        readme = source / "README.md"
        readme.write_text(with_addresses(readme.read_text(), url, version))
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", out]
    run([sys.executable, "-m", "build", "--sdist", *options, source], WORK, env)
    run(["tar", "-xf", out / f"ascend_moe-{version}.tar.gz"], WORK, env)
    return WORK / f"ascend_moe-{version}"


def make_wheel(source: Path, version: str, machine: str, out: Path, env: Mapping[str, str]) -> Path:
    """A wheel of an unpacked sdist, with no word in it of where it was built."""
    defines = {f"ASCEND_MOE_{part}": "ON" for part in ("CHECKED", "TIMED", "VNPU")} | {"ASCEND_MOE_NPU": "OFF"}
    defines["CMAKE_CXX_COMPILER"] = COMPILERS[machine]
    if machine != platform.machine():
        defines |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
    settings = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()] + ["-Cwheel.reproducible=true"]
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", out, *settings]
    flags = {"CXXFLAGS": f"-ffile-prefix-map={source}=.", "_PYTHON_HOST_PLATFORM": f"{PLATFORM}_{machine}"}
    run([sys.executable, "-m", "build", "--wheel", *options, source], WORK, {**env, **flags})
    wheel = out / f"ascend_moe-{version}-py3-none-{PLATFORM}_{machine}.whl"
    if not wheel.is_file():
        raise ReleaseError(f"no {wheel.name} was made, but {', '.join(path.name for path in out.iterdir())}")
    check_libraries(wheel, machine)
    return wheel


def check_libraries(wheel: Path, machine: str) -> None:
    """Each library is of this machine, runs on the platform of the wheel's name, and names no folder of the build."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".so", ".a"))]
        if not any(name.endswith("libascend_moe_torch.so") for name in names):
            raise ReleaseError(f"{wheel.name} has no compiled torch ops")
        for name in names:
            data = archive.read(name)
            if str(ROOT).encode() in data:
                raise ReleaseError(f"{name} of {wheel.name} contains {ROOT}")
            if name.endswith(".a"):
                continue
            if int.from_bytes(data[18:20], "little") != ELF_MACHINE[machine]:
                raise ReleaseError(f"{name} of {wheel.name} is not of {machine}")
            library = WORK / Path(name).name
            library.write_bytes(data)
            too_new = newer(run(["readelf", "--version-info", "--wide", library], WORK, clean_environment()))
            if too_new:
                raise ReleaseError(f"{name} of {wheel.name} needs {', '.join(too_new)}, {PLATFORM} has {NEWEST}")


def newer(readelf: str) -> list[str]:
    """The symbol versions in readelf's list that the platform does not have."""
    versions = set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", readelf))
    return [f"{name}_{v}" for name, v in sorted(versions) if tuple(map(int, v.split("."))) > NEWEST[name]]


# ---- the files are tried ----


def pip(python: Path, *words: str | Path) -> list[str | Path]:
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]


def try_without_compiler(wheel: Path, tree: Path, torch: list[str]) -> Path:
    """Installs the wheel in a clean environment and runs the quickstart where PATH has this environment alone."""
    env, python = clean_environment(), WORK / "venv" / "bin" / "python"
    run([sys.executable, "-m", "venv", WORK / "venv"], WORK, env)
    with step("clean environment: torch"):
        run(pip(python, *torch), WORK, env)
    with step("clean environment: pip install of the wheel"):
        run(pip(python, wheel), WORK, env)
    example = (tree / "examples" / "quickstart.py").read_text()
    program = WORK / "quickstart.py"
    program.write_text(example)
    alone = {"PATH": str(python.parent), "HOME": str(WORK)}
    if any(shutil.which(name, path=alone["PATH"]) for name in ("cc", "gcc", "c++", "g++", "clang++", "cmake")):
        raise ReleaseError(f"{python.parent} has a compiler: it is to be a clean environment")
    with step("clean environment: quickstart without a compiler"):
        printed = run([python, program], WORK, alone)
    wanted = re.findall(r"^# (rank .*\n)", example, re.MULTILINE)
    if not wanted or printed != "".join(wanted):
        raise ReleaseError(f"the quickstart printed\n{printed}in the place of what stands at its end")
    return python


def try_tests(python: Path, wheel: Path, tree: Path, which: str) -> None:
    """Runs the tests of the tree against the installed wheel."""
    env = clean_environment() | {"ASCEND_MOE_TEST_INSTALLED": "1", "ASCEND_MOE_CACHE": str(WORK / "cache")}
    run(pip(python, f"{wheel}[test]"), WORK, env)
    command = [python, "-m", "pytest", "--timeout=300", *TESTS[which]]
    if subprocess.run(command, cwd=tree / "tests", env=env, check=False).returncode != 0:
        raise ReleaseError(f"tests fail with the wheel: {shlex.join(map(str, command))} in {tree / 'tests'}")


def debian_root() -> Path:
    """Debian's Python for aarch64, unpacked and not installed; kept between releases."""
    root = ROOT / "build" / f"{DEBIAN}-aarch64"
    if not root.is_dir():
        part, env = root.with_suffix(".part"), clean_environment()
        shutil.rmtree(part, ignore_errors=True)
        packages = part / "packages"
        options = ["--download-only", "--variant=minbase", "--include=python3,libstdc++6,libgomp1", "--arch=arm64"]
        run(["debootstrap", *options, DEBIAN, packages], ROOT, env)
        for package in sorted(packages.rglob("*.deb")):
            run(["dpkg-deb", "-x", package, part / "root"], ROOT, env)
        (part / "root").rename(root)
        shutil.rmtree(part)
    return root


def try_emulated(wheel: Path, tree: Path) -> None:
    """Runs tests/test_tiny.py with the aarch64 wheel on qemu's aarch64."""
    root, folder, env = debian_root(), WORK / "aarch64", clean_environment()
    site, python = folder / "site", folder / "python"
    glibcs = [f"--platform={name}_aarch64" for name in (PLATFORM, "manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    target = ["--target", site, *glibcs, "--python-version", DEBIAN_PYTHON, "--only-binary=:all:"]
    here = Path(sys.executable)
    run(pip(here, *target, *OF_TORCH, *OF_TINY), WORK, env)
    run(pip(here, *target, "--no-deps", EMULATED_TORCH, wheel), WORK, env)
    emulator = ["qemu-aarch64-static", "-L", str(root)]
    # Python starts others of itself: by this name, which it takes from -0.
    words = f'{shlex.join(emulator)} -0 "$0" {shlex.quote(f"{root}/usr/bin/python{DEBIAN_PYTHON}")} "$@"'
    python.write_text(f"#!/bin/sh\nexec {words}\n")
    python.chmod(0o755)
    for name in ("test_tiny.py", "conftest.py"):
        shutil.copy(tree / "tests" / name, folder)
    shutil.copytree(tree / "tests" / "helpers", folder / "helpers")
    env |= {
        "PYTHONPATH": f"{site}:{folder / 'helpers'}",
        "ASCEND_MOE_TEST_INSTALLED": "1",
        "ASCEND_MOE_TIMEOUT_S": "600",
    }
    env |= {"ASCEND_MOE_CACHE": str(folder / "cache"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    machine = run([python, "-c", "import platform; print(platform.machine())"], folder, env).strip()
    said = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=1800", "test_tiny.py"], folder, env)
    print(f"release: {wheel.name} on {machine}: {said.strip().splitlines()[-1]}", flush=True)
    if machine != "aarch64":
        raise ReleaseError(f"the emulated Python says that it runs on {machine}")


# ---- what is left ----


def built_with(env: Mapping[str, str]) -> str:
    lines = [f"commit {git('rev-parse', 'HEAD').decode().strip()}", f"SOURCE_DATE_EPOCH {env['SOURCE_DATE_EPOCH']}"]
    lines += [run([name, "--version"], WORK, env).splitlines()[0] for name in COMPILERS.values()]
    lines += [f"Python {platform.python_version()}"]
    lines += [f"{name} {version_of(name)}" for name in ("scikit-build-core", "build", "torch")]
    return "\n".join(lines) + "\n"


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 by name of every file but SHA256SUMS."""
    paths = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def deliver(out: Path, version: str) -> None:
    """Writes the sums, compares them with those of an earlier run of this commit, and puts the files into dist."""
    found, dist = sums(out), ROOT / "dist" / version
    lines = "".join(f"{digest}  {name}\n" for name, digest in found.items())
    (out / "SHA256SUMS").write_text(lines)
    with contextlib.suppress(FileNotFoundError):
        before = sums(dist)
        if (dist / "built_with.txt").read_text() == (out / "built_with.txt").read_text():
            other = [name for name, digest in found.items() if before.get(name) != digest]
            if other:
                raise ReleaseError(f"{', '.join(other)} in {out} differ from those of the run before in {dist}")
            print("release: equal hashes as in the run before", flush=True)
    shutil.rmtree(dist, ignore_errors=True)
    shutil.copytree(out, dist)
    print(f"release: {dist}\n{lines}", end="", flush=True)


def release(version: str, url: str, torch: list[str], tests: str) -> None:
    normal(version)
    check_machine()
    os.umask(0o022)
    shutil.rmtree(WORK, ignore_errors=True)
    out = WORK / "out"
    out.mkdir(parents=True)
    env = clean_environment() | {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").decode().strip()}
    tree, difference = export(version, url)
    with step("sdist"):
        source = make_sdist(tree, version, url, out, env)
    wheels = {}
    for machine in COMPILERS:
        with step(f"wheel for {machine}, from the sdist"):
            wheels[machine] = make_wheel(source, version, machine, out, env)
    run([sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir())], WORK, clean_environment())
    print("release: twine check passed", flush=True)
    python = try_without_compiler(wheels["x86_64"], tree, torch)
    if tests != "none":
        with step(f"tests ({tests}) with the wheel"):
            try_tests(python, wheels["x86_64"], tree, tests)
    with step("tests/test_tiny.py on an emulated aarch64"):
        try_emulated(wheels["aarch64"], tree)
    (out / "CHANGELOG.md").write_text(first_section((tree / "CHANGELOG.md").read_text()))
    (out / "version.patch").write_text(difference)
    (out / "built_with.txt").write_text(built_with(env))
    deliver(out, version)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes and tries the files of a release; uploads nothing.")
    parser.add_argument("version")
    parser.add_argument("--project-url", default="", help="fills [project.urls] and the README's links")
    parser.add_argument("--torch", default="torch", help="what the clean environment installs for torch")
    parser.add_argument("--index-url", help="of torch's wheels")
    parser.add_argument("--tests", default="test", choices=("test", "tiny", "none"))
    options = parser.parse_args()
    index = ["--index-url", options.index_url] if options.index_url else []
    try:
        release(options.version, options.project_url.rstrip("/"), [*index, *options.torch.split()], options.tests)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: FAIL: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
