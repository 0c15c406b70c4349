"""A process that forks while tinyq runs in it, for test_fork.py: `python forks.py DB CASE TIMES`. It ends with 0 if all was well.

The event loop runs in a thread, so that the main thread can fork at any moment of its work.
"""

import asyncio
import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from typing import Any, NoReturn

import tinyq

DB, CASE, TIMES = sys.argv[1], sys.argv[2], int(sys.argv[3])

q = tinyq.TinyQ(DB, worker=False)
written: list[str] = []  # ids that were acknowledged
ending = threading.Event()
threads = threading.active_count()


async def write_until_the_end() -> None:
    while not ending.is_set():
        jobs = await q.enqueue_many([("note", (n,)) for n in range(5)], durable=True)
        written.extend(job.id for job in jobs)


def in_thread(call: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(call, loop).result(60)


async def refused(call: Callable[[], Any]) -> None:
    try:
        answer = call()
        if isinstance(answer, Awaitable):
            await answer
    except tinyq.NotStarted as error:
        assert f"process {os.getppid()}" in str(error) and "fork" in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")


async def every_call_is_refused(used: Any, job: tinyq.Job[Any]) -> None:
    with closing(sqlite3.connect(":memory:")) as tx:
        calls: list[Callable[[], Any]] = [
            lambda: used.enqueue("note", 1, durable=True),
            lambda: used.enqueue("note", 1, tx=tx),
            lambda: used.enqueue(print),
            lambda: used.enqueue_many([("note", (1,))], durable=True),
            lambda: used.spawn(asyncio.sleep(0)),
            lambda: used.get(job.id),
            lambda: used.stats(),
            lambda: used.requeue(job.id),
            lambda: used.drain(),
            lambda: used.quiesce(),
            lambda: used.stop(),
            lambda: used.stop(grace=0),
            lambda: job.result(timeout=5),
            lambda: job.cancel(),
            lambda: job.exists(),
            lambda: job.promote(),
        ]
        for call in calls:
            await refused(call)
    assert job.status == "pending"
    assert threading.active_count() == 1, threading.enumerate()


async def start_of_its_own() -> None:
    async with tinyq.TinyQ(DB, worker=False) as own:
        written.append((await own.enqueue("own", os.getpid(), durable=True)).id)
    await q.start()  # the inherited one may begin anew, too
    written.append((await q.enqueue("own", os.getpid(), durable=True)).id)
    await q.stop()


async def leaves_the_block() -> None:
    async with tinyq.TinyQ(DB, worker=False) as inner:
        job = await inner.enqueue("note", 1, durable=True)
        if fork():
            try:
                await refused(lambda: inner.get(job.id))
                await inner.__aexit__()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # to unwind the loop itself would disturb the parent's: they share what the loop waits on
        written.append((await inner.enqueue("note", 2, durable=True)).id)


def outlived_by_its_child() -> None:
    """The child works on after its parent has closed the file, and so has every other process."""
    told, tell = os.pipe()
    ready, report = os.pipe()
    in_thread(q.start())
    in_thread(q.enqueue("note", 0, durable=True))
    if os.fork() == 0:
        own = tinyq.TinyQ(DB, worker=False)
        runner = asyncio.Runner()
        runner.run(own.start())
        runner.run(own.enqueue("note", 1, durable=True))
        os.write(report, b".")
        os.read(told, 1)
        runner.run(own.enqueue("note", 2, durable=True))
        os._exit(0)
    os.read(ready, 1)
    in_thread(q.stop())
    other = [sys.executable, "-c", "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('DELETE FROM tinyq_meta WHERE 0')"]
    subprocess.run([*other, DB], check=True)
    os.write(tell, b".")
    assert os.wait()[1] == 0
    with closing(sqlite3.connect(DB)) as db:
        assert db.execute("SELECT payload FROM tinyq_jobs ORDER BY seq").fetchall() == [(f"[[{n}],{{}}]",) for n in range(3)]
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def fork() -> bool:
    """True in the child; the parent waits for it, and requires that it ends well."""
    child = os.fork()
    if child == 0:
        return True
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "a child does not end"
        time.sleep(0.001)
    assert ended[1] == 0, f"a child ended with {ended[1]}"
    return False


def child(round: int, job: tinyq.Job[Any]) -> NoReturn:
    global q, loop
    if CASE == "own":
        asyncio.run(start_of_its_own())
    elif CASE == "default":
        asyncio.run(every_call_is_refused(tinyq, job))
    elif CASE == "random":
        os.write(1, f"{tinyq.dice().random()}\n".encode())
    else:
        asyncio.run(every_call_is_refused(q, job))
    del q, loop
    gc.collect()
    if round % 2:
        os._exit(0)
    sys.exit(0)  # unwinds, runs what was registered for the exit, frees all there is


def main() -> None:
    in_thread(tinyq.start() if CASE == "default" else q.start())
    job = in_thread((tinyq if CASE == "default" else q).enqueue("note", -1, durable=True))
    writing = asyncio.run_coroutine_threadsafe(write_until_the_end(), loop) if CASE == "busy" else None
    tinyq.dice()
    for round in range(TIMES):
        if fork():
            child(round, job)
    ending.set()
    if writing is not None:
        writing.result(60)
    in_thread(tinyq.stop() if CASE == "default" else q.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()
    with closing(sqlite3.connect(DB)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        stored = {tinyq.id_text(id) for (id,) in db.execute("SELECT id FROM tinyq_jobs")}
    assert not set(written) - stored, "acknowledged jobs are missing"
    assert CASE != "busy" or len(written) > TIMES


if CASE == "default":
    tinyq.configure(DB, worker=False)
loop = asyncio.new_event_loop()
thread = threading.Thread(target=loop.run_forever, daemon=True)
thread.start()
if CASE == "block":
    asyncio.run(leaves_the_block())
elif CASE == "outlived":
    outlived_by_its_child()
else:
    main()
