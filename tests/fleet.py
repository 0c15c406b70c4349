"""Several processes that work on one database file, for tests."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

from servers import wait_until

from tinyq import Job, TinyQ

MEMBER = Path(__file__).parent / "workers" / "member.py"
ROOT = Path(__file__).parents[1]


class Fleet:
    """One database file, and the processes that work on it."""

    def __init__(self, folder: Path) -> None:
        self.db = str(folder / "jobs.db")
        self.log = folder / "members.log"
        self._marks = folder / "marks"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        print(self.log.read_text() if self.log.exists() else "")  # pytest shows it when the test fails

    def member(
        self,
        tasks: Mapping[str, int] | None = None,
        *,
        batches: Mapping[str, int] | None = None,
        every: Mapping[str, Any] | None = None,
        loops: int = 1,
        **options: Any,
    ) -> "Member":
        """A process that knows these tasks, with so many starts, and batch handlers, of such size; ready when this returns."""
        wishes = {"tasks": tasks or {}, "batches": batches or {}, "every": every, "loops": loops, "options": options}
        return self._stack.enter_context(Member(self, wishes, self.db, str(self._marks)))

    def marks(self, *words: object) -> list[list[str]]:
        """What the members have noted that begins with these words, each as [process, word, …]."""
        lines = self._marks.read_text().splitlines() if self._marks.exists() else []
        wanted = [str(word) for word in words]
        return [line.split() for line in lines if line.split()[1 : len(wanted) + 1] == wanted]

    def wait_for_marks(self, count: int, *words: object) -> list[list[str]]:
        wait_until(f"{count} marks {words}", lambda: len(self.marks(*words)) >= count)
        return self.marks(*words)

    def enqueue(self, task: str, *arguments: object) -> list[str]:
        """Ids of durable jobs, one for each argument, from a process that runs none."""

        async def enqueue() -> Sequence[Job[Any]]:
            async with TinyQ(self.db, worker=False) as q:
                return await q.enqueue_many([(task, (argument,)) for argument in arguments], durable=True)

        return [job.id for job in asyncio.run(enqueue())]

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.db, timeout=10)) as db:
            return db.execute(f"SELECT {', '.join(columns)} FROM tinyq_jobs ORDER BY seq").fetchall()

    def wait_for_rows(self, rows: list[tuple[Any, ...]], *columns: str) -> None:
        wait_until(f"{columns} are {rows}", lambda: self.rows(*columns) == rows)

    def log_lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def unknown(self) -> tuple[str, ...]:
        async def unknown() -> tuple[str, ...]:
            async with TinyQ(self.db, worker=False) as q:
                return (await q.stats()).unknown

        return asyncio.run(unknown())


class Member:
    """One process of a fleet; gone on exit."""

    def __init__(self, fleet: Fleet, wishes: Mapping[str, Any], *arguments: str) -> None:
        command = [sys.executable, str(MEMBER), *arguments, json.dumps(wishes)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with fleet.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env)
        self._fleet = fleet
        self.pid = str(self._process.pid)

    def __enter__(self) -> Self:
        try:
            wait_until("the member has started", lambda: [self.pid, "started"] in self._fleet.marks("started") or self.ended())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """kill -9"""
        self._process.kill()
        self._process.wait()

    def finish(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0
