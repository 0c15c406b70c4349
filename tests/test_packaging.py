"""What is shipped: the wheel, its types, the file copied on its own, and what an import costs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOOD = """
from typing import assert_type

import tinyq


@tinyq.task(queue="emails", timeout=30)
async def send_receipt(order_id: str, copies: int = 1) -> int:
    return copies


@tinyq.task
def resize(path: str) -> bytes:
    return path.encode()


@tinyq.every(60)
async def refresh() -> None:
    await refresh.enqueue()


async def use() -> None:
    job = await send_receipt.enqueue("7", copies=2)
    assert_type(await job.result(), int)
    assert_type(job.id, str)
    assert_type(job.created, bool)
    assert_type(job.status, tinyq.State)
    assert_type(await (await resize.options(delay=1.5, key="7").enqueue("a.png")).result(), bytes)
    assert_type(await (await tinyq.enqueue(send_receipt, "7", durable=True)).result(), int)
    assert_type(await send_receipt("7"), int)
    assert_type(resize("a.png"), bytes)
    async with tinyq.TinyQ("jobs.db", concurrency=5) as q:
        assert_type(await q.stats(), tinyq.Stats)
"""
BAD = """
import tinyq


@tinyq.task(queue="emails")
async def send_receipt(order_id: str, copies: int = 1) -> int:
    return copies


async def misuse() -> None:
    await send_receipt.enqueue(7)  # wrong
    await send_receipt.enqueue("7", copy=2)  # wrong
    await send_receipt.enqueue()  # wrong
    await send_receipt.options(quue="emails").enqueue("7")  # wrong
    await tinyq.enqueue(send_receipt, 7, durable=True)  # wrong
    text: str = await (await send_receipt.enqueue("7")).result()  # wrong
    print(text)


tinyq.task(timeout="soon")  # wrong
tinyq.TinyQ(concurency=5)  # wrong
"""


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=ours | env, capture_output=True, text=True, timeout=100)


def succeed(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that must end with exit code 0."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    succeed(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", folder, source, cwd=ROOT)
    [artifact] = folder.iterdir()
    return artifact


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    succeed(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    succeed(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel, cwd=folder)
    return python


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without packages."""
    folder = tmp_path_factory.mktemp("bare")
    succeed(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    return folder / "bin" / "python"


@pytest.fixture
def vendored(tmp_path: Path) -> Path:
    """A directory that holds a copy of the module and nothing else."""
    shutil.copy(ROOT / "tinyq.py", tmp_path)
    return tmp_path


def mypy(program: str, python: Path, folder: Path) -> set[int]:
    """The lines on which mypy reports an error."""
    (folder / "program.py").write_text(program)
    done = run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "program.py", cwd=folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {int(line) for line in re.findall(r"^program\.py:(\d+): error", done.stdout, re.MULTILINE)}


def pyright(program: str, python: Path, folder: Path) -> set[int]:
    """The lines on which pyright reports an error."""
    (folder / "program.py").write_text(program)
    command = (sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python, "program.py")
    done = run(*command, cwd=folder, PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {found["range"]["start"]["line"] + 1 for found in json.loads(done.stdout)["generalDiagnostics"]}


def marked(program: str) -> set[int]:
    return {number for number, line in enumerate(program.splitlines(), 1) if line.endswith("# wrong")}


def test_the_wheel_holds_the_module_and_the_same_file_as_its_types(wheel: Path) -> None:
    files = contents(wheel)
    source = (ROOT / "tinyq.py").read_bytes()
    assert files["tinyq.py"] == source
    assert files["tinyq-stubs/__init__.pyi"] == source
    assert {name for name in files if ".dist-info/" not in name} == {"tinyq.py", "tinyq-stubs/__init__.pyi"}


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in the first releases of 3.11
        archive.extractall(tmp_path / "source")
    [source] = (tmp_path / "source").iterdir()
    assert contents(build("wheel", source, tmp_path / "wheel")) == contents(wheel)


def test_the_installed_wheel_can_be_imported(installed: Path, tmp_path: Path) -> None:
    program = "import aiosqlite, importlib.metadata as m, tinyq; print(tinyq.__version__, m.version('tinyq-py'))"
    version, distribution_version = succeed(installed, "-I", "-W", "error", "-c", program, cwd=tmp_path).split()
    assert version == distribution_version


def test_the_installed_wheel_has_a_command(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import tinyq\nq = tinyq.TinyQ()\n")
    done = run(installed.parent / "tinyq", "worker", "main:q", cwd=tmp_path)
    assert done.returncode == 1
    assert "tinyq: main:q has no database" in done.stderr


def test_the_changelog_begins_with_the_version_of_the_module() -> None:
    [version] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "tinyq.py").read_text(), re.MULTILINE)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


def test_mypy_accepts_right_use_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    assert mypy(GOOD, installed, tmp_path) == set()


def test_mypy_reports_each_wrong_use_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    assert mypy(BAD, installed, tmp_path) == marked(BAD)


def test_pyright_accepts_right_use_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    assert pyright(GOOD, installed, tmp_path) == set()


def test_pyright_reports_each_wrong_use_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    assert pyright(BAD, installed, tmp_path) == marked(BAD)


def test_the_file_alone_runs_best_effort_and_periodic_work_without_any_package(bare: Path, vendored: Path) -> None:
    (vendored / "program.py").write_text("""
import asyncio
import tinyq

ticked = asyncio.Event()

@tinyq.task
async def double(number):
    return 2 * number

@tinyq.every(0.1)
async def tick():
    ticked.set()

async def main():
    async with tinyq.lifespan():
        job = await tinyq.enqueue(double, 21)
        print(await job.result(timeout=30))
        await asyncio.wait_for(ticked.wait(), 30)
        print("ticked")

asyncio.run(main())
""")
    assert succeed(bare, "-W", "error", "program.py", cwd=vendored).split() == ["42", "ticked"]


def test_a_durable_job_without_aiosqlite_is_an_import_error_that_names_the_install_command(bare: Path, vendored: Path) -> None:
    (vendored / "program.py").write_text("""
import asyncio
import tinyq

@tinyq.task
async def noop():
    pass

async def main():
    async with tinyq.lifespan(db="jobs.db"):
        await tinyq.enqueue(noop, durable=True)

asyncio.run(main())
""")
    done = run(bare, "program.py", cwd=vendored)
    assert done.returncode == 1
    assert re.search(r"^ImportError: .*pip install .*aiosqlite", done.stderr, re.MULTILINE), done.stderr


def test_an_import_loads_nothing_but_the_standard_library(tmp_path: Path) -> None:
    # In the environment of the tests, where any other package that it might try to import is installed.
    program = (
        "import sys; before = set(sys.modules); import tinyq;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(*new - sys.stdlib_module_names)"
    )
    assert succeed(sys.executable, "-c", program, cwd=ROOT).split() == ["tinyq"]


def test_an_import_leaves_no_event_loop_open_file_or_thread() -> None:
    program = """
import asyncio, gc, os, threading
files = os.listdir("/dev/fd")
import tinyq
assert os.listdir("/dev/fd") == files
assert threading.enumerate() == [threading.main_thread()]
assert not [o for o in gc.get_objects() if isinstance(o, asyncio.AbstractEventLoop)]
"""
    succeed(sys.executable, "-W", "error", "-c", program, cwd=ROOT)
