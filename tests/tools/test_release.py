"""tools/release.py: the texts that it writes, and what it refuses. `make nightly` makes a whole release."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import release

TREE = Path(__file__).resolve().parents[2]
URL = "https://host/owner/ascend_moe"
CHANGELOG = "# Changelog\n\n## 1.2.0, unreleased\n\n### 2026-11-27, a\n\n- b\n\n## 1.1.0, 2026-01-01\n\n- c\n"


@pytest.mark.parametrize("version", ["1.2.0", "0.1.0rc1", "1.0.dev3"])
def test_a_version_is_taken_as_it_is(version: str) -> None:
    assert release.normal(version) == version


@pytest.mark.parametrize("version", ["1.2.0-rc1", "v1.2", "1.02", "", "next"])
def test_a_version_that_an_index_writes_in_another_way_is_refused(version: str) -> None:
    with pytest.raises(release.ReleaseError, match=f"^VERSION={version} is no version as PEP 440 writes it"):
        release.normal(version)


def test_the_version_and_nothing_else_is_written() -> None:
    pyproject = (TREE / "pyproject.toml").read_text()
    changed = release.with_version(pyproject, "7.0rc1")
    assert set(changed.splitlines()) - set(pyproject.splitlines()) == {'version = "7.0rc1"'}
    assert len(changed.splitlines()) == len(pyproject.splitlines())


def test_one_address_fills_the_urls_and_a_second_release_changes_none() -> None:
    pyproject = (TREE / "pyproject.toml").read_text()
    changed = release.with_urls(pyproject, URL)
    section = changed.partition("[project.urls]")[2].partition("\n\n")[0]
    assert f'Homepage = "{URL}"\n' in section and f'Issues = "{URL}/issues"\n' in section and '"CANN" = ' in section
    assert release.with_urls(changed, URL) == changed
    assert release.with_urls(changed, "https://other").count("https://other") == 4 and URL not in release.with_urls(
        changed, "https://other"
    )


@pytest.mark.parametrize("version", ["1.2.0", "1.2.0rc1"])
def test_the_first_section_gets_version_and_day(version: str) -> None:
    dated = release.with_date(CHANGELOG, version, "2026-11-27")
    assert release.first_section(dated) == f"## {version}, 2026-11-27\n\n### 2026-11-27, a\n\n- b\n"
    assert release.with_date(dated, version, "2026-11-27") == dated, "the release's own commit changes nothing"
    with pytest.raises(release.ReleaseError, match=f"first section is '{version}, 2026-11-27', of release 1.3.0 it is"):
        release.with_date(dated, "1.3.0", "2026-11-27")


def test_the_changelog_of_this_tree_can_be_released() -> None:
    (version,) = [line[11:-1] for line in (TREE / "pyproject.toml").read_text().splitlines() if line[:9] == "version ="]
    dated = release.with_date((TREE / "CHANGELOG.md").read_text(), version, "2026-11-27")
    assert release.first_section(dated).count("\n- ") > 1


def test_links_of_the_readme_lead_to_the_project_from_anywhere() -> None:
    text = "![p](docs/a.svg) [b](docs/b.md#c) [d](#e) [f](https://g)\n"
    assert release.with_addresses(text, URL, "1.2.0") == (
        f"![p]({URL}/raw/v1.2.0/docs/a.svg) [b]({URL}/blob/v1.2.0/docs/b.md#c) [d](#e) [f](https://g)\n"
    )
    assert "](docs/" not in release.with_addresses((TREE / "README.md").read_text(), URL, "1.2.0")


def test_one_address_fills_the_clone_line_of_both_readmes() -> None:
    """And leaves the translation as current as it was."""
    before = {name: (TREE / name).read_text() for name in release.READMES}
    after = release.with_clone_of(before, URL)
    for name in release.READMES:
        changed = set(after[name].splitlines()) - set(before[name].splitlines())
        (line,) = [line for line in changed if not line.startswith("<!-- translation")]
        assert line.startswith(f"    git clone {URL} ascend_moe && cd ascend_moe ") and "#" not in line
        assert "git clone URL" in before[name]
    current = [release.translations.text_hash(each["README.md"]) in each["README.zh.md"] for each in (before, after)]
    assert current[0] == current[1]
    assert release.with_clone_of(after, URL) == after


def test_git_applies_the_patch(tmp_path: Path) -> None:
    before = {"a.txt": "one\ntwo\n", "b.txt": "same\n"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    difference = release.patch(before, {"a.txt": "one\nthree\n", "b.txt": "same\n"})
    subprocess.run(["git", "apply"], cwd=tmp_path, input=difference, text=True, check=True)
    assert (tmp_path / "a.txt").read_text() == "one\nthree\n"
    assert release.patch(before, before) == ""


def test_symbols_that_the_named_system_lacks_are_told() -> None:
    said = (
        "  0x10:   Name: GLIBC_2.34  Flags: none  Version: 4\n Name: GLIBCXX_3.4.31\n Name: GLIBC_2.4\n Name: GCC_3.0\n"
    )
    assert release.newer(said) == ["GLIBCXX_3.4.31"]
    assert release.newer(said + "Name: GLIBC_2.38\n") == ["GLIBC_2.38", "GLIBCXX_3.4.31"]


def test_variables_that_change_a_build_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CXX", "CXXFLAGS", "PYTHONPATH", "ASCEND_HOME_PATH", "CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    kept = release.clean_environment()
    assert kept["PIP_INDEX_URL"] == "kept" and kept["LC_ALL"] == "C.UTF-8" and "PATH" in kept
    assert "x" not in kept.values()


def test_sums_are_compared_with_those_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "ROOT", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "built_with.txt").write_text("commit 1\n")
    (out / "a.whl").write_text("wheel")
    release.deliver(out, "1.2.0")
    assert "equal hashes" not in capsys.readouterr().out
    release.deliver(out, "1.2.0")
    assert "equal hashes as in the run before" in capsys.readouterr().out
    listed = (tmp_path / "dist" / "1.2.0" / "SHA256SUMS").read_text()
    assert listed.splitlines()[0] == f"{release.sums(out)['a.whl']}  a.whl" and len(listed.splitlines()) == 2
    (out / "a.whl").write_text("another")
    with pytest.raises(release.ReleaseError, match=r"^a\.whl in .*out differ from those of the run before"):
        release.deliver(out, "1.2.0")
    (out / "built_with.txt").write_text("commit 2\n")  # of other sources: not compared
    release.deliver(out, "1.2.0")
    assert (tmp_path / "dist" / "1.2.0" / "a.whl").read_text() == "another"
