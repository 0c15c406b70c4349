"""Measures what `import tinyq` costs beyond `import asyncio`: compiled, in a warm file cache, in fresh processes.

    python benchmarks/import_time.py

Exits with 1 if the median is above 15 ms.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 21
LIMIT = 15.0  # milliseconds

MEASURE = """
import sys, time, asyncio
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
import tinyq
print((time.perf_counter() - start) * 1000)
"""


def import_time(folder: str) -> float:
    # Without -S and -I the environment's own start-up files could have imported some of it already.
    command = [sys.executable, "-S", "-I", "-c", MEASURE, folder]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(__file__).parents[1] / "tinyq.py", folder)
        subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True)
        import_time(folder)  # warms the file cache
        times = [import_time(folder) for _ in range(RUNS)]
    median = statistics.median(times)
    print(f"import tinyq: {median:.1f} ms beyond asyncio (median of {RUNS}; {min(times):.1f} to {max(times):.1f})")
    return 1 if median > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
