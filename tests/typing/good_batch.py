"""Right uses of batch handlers: type checkers accept all of it. It is checked and never run."""
# pyright: strict

from collections.abc import Sequence
from typing import Any, assert_type

from fastapi import Depends

import tinyq

q = tinyq.TinyQ()


@q.batch(10)
async def poll(items: list[int]) -> list[object]:
    return [*items]


@tinyq.batch(500, window=0.05, name="mail", queue="emails", max_running=3, limit_by="items", rate=tinyq.Rate(3, per=60))
def mail(items: list[str]) -> None: ...


@q.batch(10)
async def any_sequence(items: Sequence[int]) -> None: ...


@q.batch(10)
async def with_session(items: list[int], session: str = Depends(str)) -> None: ...


class Store:
    async def fetch(self, items: list[bytes]) -> list[str] | None:
        return [str(item) for item in items]


fetch = q.batch(3, aliases=["old_fetch"], promote=True)(Store().fetch)


async def a_call_takes_a_list() -> None:
    assert_type(await poll([1, 2]), list[object])
    assert_type(await poll.fn([1, 2]), list[object])
    assert_type(mail(["a@b.c"]), None)
    assert_type(await fetch([b"7"]), list[str] | None)
    await with_session([7], session="one")


async def a_job_takes_one_item() -> None:
    assert_type(await poll.enqueue(7), tinyq.Job[Any])
    assert_type(poll.enqueue_sync(7), tinyq.Job[Any])
    assert_type(await mail.options(key="7", delay=3).enqueue("a@b.c"), tinyq.Job[Any])
    await any_sequence.enqueue(7)
    await with_session.enqueue(7)
    await fetch.enqueue(b"7")
    assert_type(await q.enqueue(poll, 7), tinyq.Job[Any])
    await tinyq.enqueue(mail, "a@b.c", durable=True, queue="others")
    tinyq.enqueue_sync(poll, 7, priority=3)
    assert_type(await q.schedule(poll, 7, when=tinyq.Every(1), key="7"), tinyq.RecurringJob)
    await q.enqueue_many([(poll, (7,)), (poll, (8,))])


async def a_batch_handler_is_a_task() -> None:
    task: tinyq.Task[[int], Any, Any] = poll
    await q.unschedule(task, key="7")
    await q.dead(poll)
    assert_type([job.attempt for job in tinyq.current_job().batch], list[int])
