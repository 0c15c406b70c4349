"""Puts the module and its types into the wheel.

Type checkers ignore the annotations of an installed module unless there is a `py.typed` marker, and only a package has
a place for one. So the wheel holds `tinyq.py` and, made from the same file, the stub package `tinyq-stubs`.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TypesHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # type checkers would go on reading the copy after the file has changed
            return
        # hatchling drops a selected file whose path is force-included elsewhere; a copy has a path of its own.
        self.folder = Path(tempfile.mkdtemp())
        stub = shutil.copyfile(Path(self.root, "tinyq.py"), self.folder / "__init__.pyi")
        build_data["force_include"][str(stub)] = "tinyq-stubs/__init__.pyi"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self.folder)
