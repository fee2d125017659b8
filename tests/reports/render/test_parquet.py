"""Records and numbers as Parquet."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from reports.errors import MissingPackage
from reports.numbers import RunNumbers
from reports.render import parquet, tables
from reports.run import read_records
from reports.write import Asked, write_report


def test_every_request_and_every_number(folder: Path, run: RunNumbers, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    write_report([folder], tmp_path, Asked(("parquet",)))
    records = read_records(folder)
    rows = arrow.read_table(tmp_path / "requests.parquet").to_pylist()
    assert len(rows) == len(records.requests) == run.requests
    for row, record in zip(rows[:50], records.requests, strict=False):
        assert row["run"] == run.manifest.run_id and row["content_seconds"] == (
            record.content_seconds
        )
        assert all(row[name] == getattr(record, name) for name in record.__struct_fields__)
    assert arrow.read_table(tmp_path / "levels.parquet").to_pylist() == tables.level_records(run)
    cells = arrow.read_table(io.BytesIO(parquet.to_parquet(tables.cell_records(run))))
    assert cells.to_pylist() == tables.cell_records(run)


def test_without_pyarrow_it_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match=r"needs pyarrow.*llm-crossover\[parquet\]"):
        write_report([folder], tmp_path, Asked(("parquet",)))
    assert not list(tmp_path.iterdir())
