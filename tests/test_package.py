"""What a release uploads says of itself; `make package` builds it and uses it."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]


@pytest.fixture(scope="module")
def description():
    """The description as the package has it."""
    made = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    return made["description"]()


def test_every_link_of_the_description_is_absolute(description):
    """An index shows the text alone, without the files beside it."""
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert len(targets) >= 20
    for target in targets:
        assert re.match(r"https?://|#", target), target


def test_links_to_the_sources_lead_to_files(description):
    readme = (ROOT / "README.md").read_text()
    links = re.findall(
        rf"\]\({re.escape(SOURCE)}/(blob|raw)/main/([^)#]*)", description
    )
    relative = re.findall(r"\]\((?!https?:|#)([^)#]*)", readme)
    assert [path for _, path in links] == relative
    for kind, path in links:
        assert (ROOT / path).is_file(), path
        # A picture is sent itself, everything else as a page about it.
        assert (kind == "raw") == path.endswith(".png")


def test_nothing_else_of_the_readme_is_changed(description):
    plain = re.sub(rf"{re.escape(SOURCE)}/(blob|raw)/main/", "", description)
    assert plain == (ROOT / "README.md").read_text()


def test_addresses_are_of_one_place():
    """So that a release changes the one line that says where the sources are."""
    for name, address in PROJECT["urls"].items():
        assert address.startswith(SOURCE), name
        path = address.removeprefix(SOURCE).removeprefix("/blob/main/")
        assert name in {"Source", "Issues"} or (ROOT / path).is_file()


def test_classifiers_agree_with_the_versions_that_are_tested():
    """docs/versions.md has the table; docs/install.md says on what jdist is tested."""
    page = (ROOT / "docs" / "versions.md").read_text()
    oldest, newest = re.search(r"\| Python \| 3\.(\d+) \| 3\.(\d+) \|", page).groups()
    found = [x.split(" :: ")[-1] for x in PROJECT["classifiers"] if "Python" in x]
    versions = {f"3.{n}" for n in range(int(oldest), int(newest) + 1)}
    assert {x for x in found if x != "Only"} == versions
    assert PROJECT["requires-python"] == f">=3.{oldest}"
    systems = [x for x in PROJECT["classifiers"] if x.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert "tested on Linux" in (ROOT / "docs" / "install.md").read_text()


def test_the_sdist_has_no_part_of_the_test_suite():
    """Setuptools takes some of its files, which cannot run without the others."""
    assert "prune tests" in (ROOT / "MANIFEST.in").read_text().splitlines()
    assert "/(tests|conftest)" in (ROOT / ".ci" / "package").read_text()


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_no_page_installs_jdist_by_name(page):
    """No index has it: another package of that name might be installed."""
    commands = re.findall(r"pip install[^`#\n]*", page.read_text())
    for command in commands:
        assert not re.search(r"(?<![/.\w])jdist\b(?!-)", command), command
