"""Real server processes that share a schedule. `python tests/ticking.py` is the same for longer."""

from pathlib import Path

import pytest
from ticking import tick


@pytest.mark.parametrize(("kill", "skew"), [(True, 0.0), (False, 2.0)])
def test_several_servers_run_every_fire_time_exactly_once(tmp_path: Path, kill: bool, skew: float) -> None:
    found = tick(tmp_path, 4, workers=3, kill=kill, skew=skew)
    assert len(found.runs) >= 3
    assert found.wrong() == []
