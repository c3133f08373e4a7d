"""What is around the package agrees with it: workflows, issue forms, changelog, citation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import fastconv
from check_release import ROOT, cited, problems, sections, version

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "performance", "question")]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")

# The first and the last PyTorch 2.x, from fastconv's lowest to the newest one, whose wheels and
# torch.compile support Python 3.y, by y.
TORCH_FOR = {10: (6, 14), 11: (6, 15), 12: (6, 15), 13: (6, 15), 14: (10, 15)}


def _load(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as True.
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in document.items()}


def _steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [job])  # a job without steps uses another workflow


def _matrix(job: str) -> dict[str, Any]:
    return _load(GITHUB / "workflows" / "tests.yml")["jobs"][job]["strategy"]["matrix"]


def _minor(text: str) -> int:
    return int(text.split(".")[1])


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _load(request.param)


def test_workflows_may_read_alone(workflow: dict[str, Any]) -> None:
    """A workflow's token may read; a job that needs more says so."""
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow["on"]


def test_jobs_end(workflow: dict[str, Any]) -> None:
    assert "concurrency" in workflow
    assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())


def test_actions_are_pinned(workflow: dict[str, Any]) -> None:
    """Actions are named by a commit, or are workflows of this repository that exist."""
    for used in (step["uses"] for step in _steps(workflow) if "uses" in step):
        assert PINNED.fullmatch(used) or (ROOT / used).is_file(), used


def test_commands_exist(workflow: dict[str, Any]) -> None:
    """What steps run is a target of the Makefile, or a file."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for run in (step["run"] for step in _steps(workflow) if "run" in step):
        for command in re.findall(r"^make (.+)$", run, re.MULTILINE):
            assert {word for word in command.split() if "=" not in word} <= targets, command
        for script in re.findall(r"\btests/\S+\.py\b", run):
            assert (ROOT / script).is_file(), script


def test_self_hosted_runners_serve_no_pull_requests(workflow: dict[str, Any]) -> None:
    if any("self-hosted" in job.get("runs-on", "") for job in workflow["jobs"].values()):
        assert set(workflow["on"]) == {"schedule", "workflow_dispatch"}


ENTRY = re.compile(r'extern "C"[^;{]*?__global__([^;{]*?)\{')
ATTRIBUTE = re.compile(r"__\w+__\((?:[^()]|\([^()]*\))*\)")


def test_compute_sanitizer_watches_every_kernel() -> None:
    """All that the library launches; what only measures a GPU's rate is not launched by it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    parts = re.findall(r"kernel_substring=(\w+)", makefile)
    names = re.findall(r"kernel_name=(\w+)", makefile)
    kernels = set()
    for path in (ROOT / "src/fastconv/kernels").rglob("*.cuh"):
        for head in ENTRY.findall(path.read_text(encoding="utf-8")):
            name = re.search(r"\w+(?=\s*\()", ATTRIBUTE.sub("", head))
            assert name is not None, path
            kernels.add(name.group())
    assert {"convolve", "copy", "reduce"} <= kernels
    watched = {one for one in kernels if one in names or any(part in one for part in parts)}
    assert kernels - watched == {"ceiling"}


def test_every_python_is_tested() -> None:
    """The matrix, the classifiers, `requires-python` and mypy's target agree."""
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert _matrix("test")["python"] == classified
    assert [_minor(one) for one in classified] == sorted(TORCH_FOR)
    assert f'requires-python = ">={classified[0]}"' in PROJECT
    assert f'python_version = "{classified[0]}"' in PROJECT
    assert _matrix("test")["machine"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]


def test_lowest_and_highest_torch_are_tested() -> None:
    """The lowest is that of pyproject.toml, and each has wheels for the Python beside it."""
    rows = [(_minor(row["torch"]), _minor(row["python"])) for row in _matrix("torch")["include"]]
    torches = [torch for torch, _ in rows]
    assert f'"torch>=2.{min(torches)}"' in PROJECT
    pinned = re.search(r"^torch==2\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert min(torches) < int(pinned[1]) <= max(torches)
    for torch, python in [*rows, *((int(pinned[1]), python) for python in TORCH_FOR)]:
        first, last = TORCH_FOR[python]
        assert first <= torch <= last, f"PyTorch 2.{torch} does not support Python 3.{python}"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_what_is_needed(path: Path) -> None:
    fields = {field["id"]: field for field in _load(path)["body"]}
    assert "fastconv info" in fields["info"]["attributes"]["label"]
    assert "shape" in fields["shape"]["attributes"]["label"]
    assert fields["shape"]["attributes"]["placeholder"].startswith("8x32x512x512 64x32x5x9 ")


def test_the_version_is_the_same_everywhere() -> None:
    assert version() == fastconv.__version__ == cited()["version"]
    assert f'license = "{cited()["license"]}"' in PROJECT


def test_the_changelog_has_sections() -> None:
    """Unreleased comes first, then versions, newest first, each with a date."""
    first, *released = sections()
    assert first[:2] == ("Unreleased", None)
    numbers = [Version(section.name) for section in released]
    assert numbers == sorted(numbers, reverse=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", section.date or "") for section in released)


# --- What a release needs -------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with the files of a version 1.2.3 that may be released."""
    (tmp_path / "src/fastconv").mkdir(parents=True)
    files = {
        "src/fastconv/_version.py": '"""The version."""\n\n__version__ = "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n"
        "## [1.2.3] - 2026-01-31\n\n- A change.\n\n"
        "## [1.2.2] - 2026-01-01\n\n- Another.\n\n[1.2.3]: https://example.com\n",
        "CITATION.cff": "version: 1.2.3\ndate-released: 2026-01-31\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_release_that_is_ready(release: Path) -> None:
    assert not list(problems("v1.2.3", release))
    assert [section.text for section in sections(release)] == ["", "- A change.", "- Another."]


def test_a_tag_of_another_version(release: Path) -> None:
    assert list(problems("v1.2.4", release)) == [
        "The tag is v1.2.4, but the package's version is 1.2.3: the tag should be v1.2.3."
    ]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- New.\n", "has text under Unreleased"),
        ("CHANGELOG.md", "## [Unreleased]\n", "", "has no section Unreleased"),
        ("CHANGELOG.md", "- A change.", "", "says nothing about 1.2.3"),
        ("CHANGELOG.md", "2026-01-31", "2026-31-01", "not one of the form YYYY-MM-DD"),
        ("CHANGELOG.md", "[1.2.3] -", "[1.2.0] -", "has no section ## [1.2.3]"),
        ("CITATION.cff", "1.2.3", "1.2.2", "CITATION.cff has version 1.2.2, not 1.2.3"),
        ("CITATION.cff", "2026-01-31", "2026-01-30", "CITATION.cff has date-released 2026-01-30"),
    ],
)
def test_a_release_that_is_not_ready(
    release: Path, name: str, old: str, new: str, message: str
) -> None:
    text = (release / name).read_text(encoding="utf-8")
    assert old in text
    (release / name).write_text(text.replace(old, new), encoding="utf-8")
    assert any(message in problem for problem in problems("v1.2.3", release))
