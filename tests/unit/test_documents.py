"""Pages that are made from the code are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.record.document import page

pytestmark = pytest.mark.timeout(60)


def test_the_schema_page_is_that_of_the_schema() -> None:
    written = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
    assert written == page(), "python -m aladdin_mpi.record.document > docs/schema.md"
