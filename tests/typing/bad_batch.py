"""Wrong uses of batch handlers, marked as in bad.py. It is checked and never run."""

from collections.abc import Sequence

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


async def a_batch_handler_is_enqueued_with_what_is_no_item() -> None:
    await poll.enqueue("7")  # error
    await poll.enqueue([7])  # error
    await poll.enqueue()  # error
    await poll.enqueue(7, 8)  # error
    await mail.options(key="7").enqueue(["a@b.c"])  # error
    mail.enqueue_sync(["a@b.c"])  # error
    await any_sequence.enqueue([7])  # error
    await with_session.enqueue([7])  # error
    await with_session.enqueue(7, "session")  # error
    await fetch.enqueue("7")  # error
    await q.enqueue(poll, "7")  # error
    await q.enqueue(poll)  # error
    tinyq.enqueue_sync(poll, "7")  # error


async def a_batch_handler_is_called_with_what_is_no_list() -> None:
    await poll(7)  # error
    await poll(["7"])  # error
    await poll()  # error
    await poll.fn(7)  # error
    mail("a@b.c")  # error


async def of_one(item: int) -> None: ...


async def of_a_dict(items: dict[int, str]) -> None: ...


def what_is_no_batch_handler() -> None:
    q.batch(10)(of_one)  # error
    q.batch(10)(of_a_dict)  # error
    q.batch(poll.fn)  # error
    q.batch()  # error
    q.batch("10")  # error
    q.batch(10, window="1")  # error
    q.batch(10, run_in="process")  # error
    q.batch(10, limit=1)  # error
    q.batch(10, rate=100)  # error
