"""A small shop whose background work is done by tinyq.

Start it with

    uvicorn --app-dir examples shop:app

and try, from another terminal,

    curl -X POST '127.0.0.1:8000/orders?item=teapot'
    curl 127.0.0.1:8000/jobs/<the job of the answer>
    curl 127.0.0.1:8000/status
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, HTTPException

import tinyq

DB = os.environ.get("SHOP_DB", "shop.db")
LEASE = float(os.environ.get("SHOP_LEASE", "30"))
OUTBOX = Path(os.environ.get("SHOP_OUTBOX", "outbox.txt"))
WORK = float(os.environ.get("SHOP_WORK", "0.5"))  # seconds that a receipt takes

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("shop")
best_sellers: dict[str, int] = {}  # the cache


# A plain function runs in a thread of tinyq's, an async one on the event loop. A durable job runs at least once: after
# a crash perhaps again, so give a real mail service the order's id to recognise a repetition by. result_ttl keeps the
# finished job for an hour, for GET /jobs/{id}.
@tinyq.task(queue="emails", timeout=30, result_ttl=3600)
def send_receipt(order_id: str, item: str) -> None:
    time.sleep(WORK)
    with OUTBOX.open("a") as outbox:
        outbox.write(f"{order_id} {item}\n")


@tinyq.task
async def refresh_cache(item: str) -> None:
    await asyncio.sleep(0.1)
    best_sellers[item] = best_sellers.get(item, 0) + 1


# With a database, one process of all those that share it runs each occurrence.
@tinyq.every(10)
async def report() -> None:
    stats = await tinyq.stats()
    log.info("%d receipts wait", stats.count(queue="emails", state="pending"))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    async with tinyq.lifespan(app, db=DB, lease=LEASE) as state:
        yield state


app = FastAPI(title="shop", lifespan=lifespan)


@app.post("/orders", status_code=202)
async def place_order(item: str = "teapot") -> dict[str, str]:
    order_id = uuid4().hex
    receipt = await tinyq.enqueue(send_receipt, order_id, item, durable=True)  # on disk from here on
    await tinyq.enqueue(refresh_cache, item)  # gone if the process dies, and no harm done
    return {"order": order_id, "job": receipt.id}


@app.get("/jobs/{job_id}")
async def job_status(job_id: str) -> dict[str, Any]:
    try:
        job = await tinyq.get(job_id)
    except tinyq.JobNotFound:
        raise HTTPException(404, f"no job {job_id}") from None
    return {"job": job.id, "task": job.task, "status": job.status, "attempts": job.attempts, "error": job.error}


@app.get("/status")
async def status() -> dict[str, Any]:
    return {"best_sellers": best_sellers, "jobs": (await tinyq.stats()).as_dict()}
