"""The typed surface: both type checkers accept right uses, and report wrong ones on exactly the lines that are marked."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOOD = sorted(Path(__file__).parent.glob("typing/good*.py"))
BAD = sorted(Path(__file__).parent.glob("typing/bad*.py"))
MODULE = ROOT / "tinyq.py"
CHECKED = [MODULE, *GOOD, *BAD]

Findings = Mapping[Path, Mapping[int, str]]  # by file and line


def run(command: Iterable[str | Path], cwd: Path, **env: str) -> str:
    ended = subprocess.run([sys.executable, "-m", *command], cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr  # 1: it has found errors; any other code: it did not check
    return ended.stdout


def by_line(findings: Iterable[tuple[str | Path, int, str]]) -> Findings:
    found: dict[Path, dict[int, str]] = {}
    for file, line, message in findings:
        lines = found.setdefault(Path(file), {})
        lines[line] = f"{lines[line]}\n{message}" if line in lines else message
    return found


def mypy(folder: Path) -> Findings:
    """What mypy --strict reports, in one run over everything."""
    command: list[str | Path] = ["mypy", "--strict", "--output=json", "--cache-dir", folder, *CHECKED]
    output = run(command, ROOT, MYPYPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    found = map(json.loads, output.splitlines())
    return by_line((ROOT / each["file"], each["line"], each["message"]) for each in found if each["severity"] == "error")


def pyright(folder: Path) -> Findings:
    """What pyright reports under the project's own configuration, in one run over everything."""
    config = {
        "extends": os.path.relpath(ROOT / "pyproject.toml", folder),
        "include": [os.path.relpath(file, folder) for file in CHECKED],
        "extraPaths": [os.path.relpath(path, folder) for path in (ROOT, ROOT / "tests")],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command: list[str | Path] = ["pyright", "--outputjson", "--pythonpath", sys.executable, "--project", folder]
    report = json.loads(run(command, folder, PYRIGHT_PYTHON_IGNORE_WARNINGS="1"))
    assert report["summary"]["filesAnalyzed"] == len(CHECKED)
    return by_line((each["file"], each["range"]["start"]["line"] + 1, each["message"]) for each in report["generalDiagnostics"])


@pytest.fixture(scope="session", params=[mypy, pyright], ids=["mypy", "pyright"])
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    found: Findings = request.param(tmp_path_factory.mktemp("checker"))
    return found


def marked(file: Path) -> set[int]:
    lines = enumerate(file.read_text().splitlines(), 1)
    return {number for number, line in lines if re.search(r"\S  # error(  # noqa: \w+)?$", line)}


def expect_none(file: Path, lines: Mapping[int, str]) -> None:
    """Fail with the lines and what is said about them, unless there are none."""
    source = file.read_text().splitlines()
    if lines:
        said = (f"{file.name}:{line}: {source[line - 1].strip()}\n{text}" for line, text in sorted(lines.items()))
        pytest.fail("\n".join(said), pytrace=False)


def test_the_module_itself_has_no_type_errors(findings: Findings) -> None:
    expect_none(MODULE, findings.get(MODULE, {}))


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.stem)
def test_right_uses_are_accepted(findings: Findings, file: Path) -> None:
    expect_none(file, findings.get(file, {}))


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_each_wrong_use_is_reported(findings: Findings, file: Path) -> None:
    missed = marked(file) - findings.get(file, {}).keys()
    expect_none(file, dict.fromkeys(missed, "is accepted"))


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_nothing_but_the_wrong_uses_is_reported(findings: Findings, file: Path) -> None:
    others = {line: text for line, text in findings.get(file, {}).items() if line not in marked(file)}
    expect_none(file, others)
