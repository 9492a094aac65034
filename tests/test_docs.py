"""What the documents name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_the_field_cases_name_exists():
    """In a row, a bare `test_...` or `Test...` belongs to the file named last."""
    named = 0
    for line in (ROOT / "docs/field_cases.md").read_text().splitlines():
        file = None
        for path, test in re.findall(r"`(?:(test_\w+\.py)::)?([tT]est\w+)`", line):
            file = path or file
            assert file is not None, line
            source = (ROOT / "tests" / file).read_text()
            assert re.search(rf"^(def {test}\(|{test} = |class {test}\b)", source, re.MULTILINE), f"{file}::{test}"
            named += 1
    assert named > 60


def test_every_setting_the_readme_names_exists():
    from trtllm_hisparse.config import HiSparseConfig

    table = (ROOT / "README.md").read_text().split("### Settings")[1].split("\n\n", 2)[2]
    names = re.findall(
        r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))
    )
    assert len(names) >= 8
    assert set(names) <= set(HiSparseConfig().to_dict())
