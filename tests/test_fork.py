"""A forked child neither uses nor closes what it inherited, and may start a TinyQ of its own."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORKS = Path(__file__).parent / "workers" / "forks.py"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]


def run(file: Path, case: str, times: int) -> str:
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore:This process:DeprecationWarning",
        str(FORKS),
        str(file),
        case,
        str(times),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def test_a_child_is_refused_every_call_and_its_end_harms_nothing_while_its_parent_writes(file: Path) -> None:
    run(file, "busy", 100)


def test_a_child_is_refused_every_call_of_the_default_instance_too(file: Path) -> None:
    run(file, "default", 10)


def test_a_child_may_start_a_tinyq_of_its_own_on_the_same_file(file: Path) -> None:
    times = 40
    run(file, "own", times)
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT count(*) FROM tinyq_jobs WHERE task = 'own'").fetchone() == (2 * times,)


def test_a_child_that_outlives_its_parent_loses_nothing(file: Path) -> None:
    run(file, "outlived", 1)


def test_a_child_that_leaves_the_block_of_a_tinyq_leaves_it_running_in_its_parent(file: Path) -> None:
    run(file, "block", 1)


def test_children_do_not_draw_the_same_random_numbers(file: Path) -> None:
    drawn = run(file, "random", 10).split()
    assert len(set(drawn)) == len(drawn) == 10
