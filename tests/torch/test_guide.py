# SPDX-License-Identifier: MIT
"""What docs/how-to/pytorch.md says is run as it stands."""

import re
from pathlib import Path

from conftest import ROOT


def test_the_guide_s_program_runs(monkeypatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/pytorch.md").read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 10
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(compile(program, str(Path("docs/how-to/pytorch.md")), "exec"), names)  # noqa: S102
    assert names["tokens"].shape == (1, 920)
    assert sum(int(layer.heads.length.sum()) for layer in names["cache"].layers) <= 92 * 16  # a tenth of 919 tokens
    assert capsys.readouterr().out
