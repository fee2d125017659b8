"""Records and numbers as Parquet: requests.parquet, cells.parquet, levels.parquet, gpus.parquet.

    to_parquet(tables.cell_records(run))          # the columns of cells.csv
    requests_parquet([read_records(folder)])      # every request, with its run

Needs pyarrow (the extra `parquet`). Missing is null.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_origin

import msgspec

from loadtests.records.old_run_folder import RunRecords
from loadtests.records.schema import RequestRecord
from reports.errors import MissingPackage
from reports.render.tables import Record


def pyarrow() -> Any:
    """The package, with its Parquet part. Raises MissingPackage where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as problem:
        raise MissingPackage(
            "--format parquet needs pyarrow, which is not installed: "
            "pip install 'llm-crossover[parquet]'"
        ) from problem
    return pyarrow


def to_parquet(records: Sequence[Record]) -> bytes:
    """Records of one kind; a column without any value has the type null."""
    return _written(pyarrow().Table.from_pylist(list(records)))


def requests_parquet(runs: Iterable[RunRecords]) -> bytes:
    """All requests on record, warm-up and unfinished levels included."""
    arrow = pyarrow()
    kinds = {
        str: arrow.string(),
        int: arrow.int64(),
        float: arrow.float64(),
        bool: arrow.bool_(),
        list: arrow.list_(arrow.float64()),
    }
    schema = [("run", arrow.string())]
    for field in msgspec.structs.fields(RequestRecord):
        schema.append((field.name, kinds[_plain_type(field.type)]))
    rows = [
        {"run": run.manifest.run_id} | msgspec.structs.asdict(record)
        for run in runs
        for record in run.requests
    ]
    return _written(arrow.Table.from_pylist(rows, schema=arrow.schema(schema)))


def _plain_type(kind: Any) -> type:
    """`int` of `int | None`, `list` of `list[float]`."""
    if get_origin(kind) is list:
        return list
    found: type = next(one for one in (*get_args(kind), kind) if one is not type(None))
    return found


def _written(table: Any) -> bytes:
    out = io.BytesIO()
    pyarrow().parquet.write_table(table, out, compression="zstd")
    return out.getvalue()
