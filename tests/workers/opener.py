"""Opens a store on each path that it is told, at once, and says how that went; for test_sqlite.py."""

import asyncio
import sys
import time

import tinyq


async def visit(path: str) -> str:
    store = tinyq.SQLiteStore(path)
    try:
        await store.open()
        now = time.time_ns() // 1000
        await store.insert([tinyq.JobRow(tinyq.new_id(now), "send", "default", 0, now, now)], now)
        return "ok"
    except tinyq.StoreError as error:
        return repr(error)
    finally:
        await store.close()


for line in sys.stdin:
    print(asyncio.run(visit(line.strip())), flush=True)
