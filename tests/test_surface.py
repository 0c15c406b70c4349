"""What can be checked of tinyq.py by reading it: its contents, its public names, the shape of its stores."""

import ast
import inspect
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

import tinyq

FILE = Path(tinyq.__file__)
SOURCE = FILE.read_text()
TREE = ast.parse(SOURCE)
FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

ERRORS = {
    "TinyQError", "NotStarted", "AlreadyStarted", "ShuttingDown", "ConfigurationError", "QueueFull", "KeyConflict",
    "UnknownTask", "DuplicateTask", "PayloadError", "PayloadTooLarge", "StoreError", "StoreBusy", "JobError", "JobFailed",
    "JobCancelled", "NoResult", "JobNotFound", "ProcessDied",
}  # fmt: skip
SIGNALS = {"Snooze", "RetryAfter", "Cancel"}
VALUES = {
    "State", "Retry", "Options", "Every", "Cron", "Task", "TinyQ", "Job", "CurrentJob", "Count", "RecurringJob", "Schedule",
    "ScheduleStats", "Stats", "Clock", "Health",
}  # fmt: skip
VERBS = {
    "task", "every", "cron", "enqueue", "enqueue_many", "spawn", "start", "stop", "quiesce", "drain", "run", "lifespan", "get",
    "stats", "requeue", "dead", "purge", "pause", "resume", "on_dead", "health", "wake", "schedule", "unschedule", "schedules",
    "testing", "on_enqueue", "middleware",
    "enqueue_sync", "batch",
}  # fmt: skip


def sections() -> list[tuple[int, str]]:
    """The numbers and titles of the banners, in the order of the file."""
    return [(int(n), title) for n, title in re.findall(r"^# ── (\d+)\. (.+?) ─+$", SOURCE, re.MULTILINE)]


def verbs(store: type) -> list[str]:
    """The public methods of a store, in the order in which they are written."""
    return [name for name, value in vars(store).items() if inspect.isfunction(value) and not name.startswith("_")]


def test_the_contents_in_the_docstring_are_the_banners_of_the_sections() -> None:
    contents = (tinyq.__doc__ or "").split("Contents\n")[1]
    assert [(int(n), title) for n, title in re.findall(r"^ *(\d+)\. (.+)$", contents, re.MULTILINE)] == sections()


def test_the_sections_are_numbered_without_a_gap() -> None:
    assert [number for number, _ in sections()] == list(range(1, len(sections()) + 1))
    assert len(sections()) > 10


def test_every_line_that_looks_like_a_banner_is_one() -> None:
    assert SOURCE.count("\n# ──") == len(sections())


def test_all_banners_are_equally_wide() -> None:
    banners = re.findall(r"^# ── .+$", SOURCE, re.MULTILINE)
    assert {len(banner) for banner in banners} == {len(banners[0])}


def test_every_section_begins_with_a_sentence_on_what_it_is_about() -> None:
    after = [text.split("\n")[1] for text in re.split(r"^# ── ", SOURCE, flags=re.MULTILINE)[1:]]
    assert [line for line in after if not line.startswith("# ")] == []


def test_the_public_names_are_sorted_and_named_once() -> None:
    assert tinyq.__all__ == sorted(set(tinyq.__all__))


def test_every_public_name_exists() -> None:
    assert [name for name in tinyq.__all__ if not hasattr(tinyq, name)] == []


def test_everything_that_is_promised_is_public() -> None:
    assert ERRORS | SIGNALS | VALUES | VERBS | {"configure", "current_job"} <= set(tinyq.__all__)


def test_every_error_of_the_module_is_public() -> None:
    defined = {name for name, value in vars(tinyq).items() if isinstance(value, type) and issubclass(value, tinyq.TinyQError)}
    assert defined <= set(tinyq.__all__)


def test_every_method_of_a_tinyq_is_also_a_function_of_the_module() -> None:
    methods = {name for name, value in vars(tinyq.TinyQ).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert methods == VERBS
    assert methods <= set(tinyq.__all__)


def test_no_public_name_is_private_by_its_spelling() -> None:
    assert [name for name in tinyq.__all__ if name.startswith("_")] == []


@pytest.mark.parametrize("name", tinyq.__all__)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = getattr(tinyq, name)
    text = inspect.cleandoc(value.__doc__ or "")
    assert text and not text.startswith(f"{name}(")  # dataclasses make up their signature as a docstring


# Promotion takes rows out of memory and, when the table refuses them, back; a shutdown is not to wait for a lock;
# a caller may bring a transaction of his own; a forked child lets go of what it inherited; others may be rung without a write;
# health names the tasks that nobody knows; what a job is told while it runs is in memory; and the most frequent paths are shorter
# than the verbs.
EXTRAS: dict[type, set[str]] = {
    tinyq.MemoryStore: {"adopt", "attach", "detach", "fire", "forget", "has_due", "keep_pace", "settle_now", "told"},
    tinyq.SQLiteStore: {"add", "disown", "exists", "hand_over", "hurry", "insert_within", "ring", "unknown"},
}


@pytest.mark.parametrize("store", [tinyq.MemoryStore, tinyq.SQLiteStore], ids=lambda store: store.__name__)
def test_a_store_has_the_verbs_of_the_contract_in_their_order(store: type) -> None:
    assert [verb for verb in verbs(store) if verb not in EXTRAS[store]] == verbs(tinyq.Store)


@pytest.mark.parametrize("verb", verbs(tinyq.Store))
@pytest.mark.parametrize("store", [tinyq.MemoryStore, tinyq.SQLiteStore], ids=lambda store: store.__name__)
def test_a_verb_of_a_store_has_the_signature_of_the_contract(store: type, verb: str) -> None:
    assert inspect.signature(getattr(store, verb)) == inspect.signature(getattr(tinyq.Store, verb))


def test_a_store_has_little_more_than_the_contract() -> None:
    for store, extras in EXTRAS.items():
        assert set(verbs(store)) - set(verbs(tinyq.Store)) == extras


def test_every_verb_of_the_contract_says_what_it_does() -> None:
    assert [verb for verb in verbs(tinyq.Store) if not getattr(tinyq.Store, verb).__doc__] == []


def test_no_function_is_longer_than_50_lines() -> None:
    lengths = {f"{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in FUNCTIONS}
    assert len(lengths) > 100
    assert {name: length for name, length in lengths.items() if length > 50} == {}


def test_no_comment_announces_unfinished_work() -> None:
    comments = [t for t in tokenize.generate_tokens(io.StringIO(SOURCE).readline) if t.type == tokenize.COMMENT]
    docstrings = [ast.get_docstring(node) or "" for node in [TREE, *FUNCTIONS]]
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP|TBD)\b", re.IGNORECASE)
    assert len(comments) > 30
    assert [text for text in [*(token.string for token in comments), *docstrings] if words.search(text)] == []


def test_only_the_standard_library_is_imported_at_the_top() -> None:
    def roots(nodes: list[ast.stmt]) -> set[str]:
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        return {name.split(".")[0] for name in found}

    assert roots(TREE.body) - {"__future__"} <= set(sys.stdlib_module_names)


def test_a_star_import_brings_exactly_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from tinyq import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(tinyq.__all__)


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tinyq.__version__)
