"""Runs as data frames and as Parquet; needs the extra `export`."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope.errors import MissingExtraError
from gyroscope.store.export import whole
from gyroscope.store.tables import Table, Wanted

if TYPE_CHECKING:
    import pandas

    from gyroscope.store.reader import Run


def to_pandas(run: Run, wanted: Wanted = None) -> pandas.DataFrame:
    """A data frame: of one quantity, steps by layers; of several or all, a row a step and layer.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     print(to_pandas(run, "rotation").tail(1))
          conv1.weight  conv2.weight  head.weight
    step
    40             0.4           0.6          0.8
    """
    pd = _needed("pandas", "a data frame")
    table = Table.of(run, wanted)
    if table.form == "wide":
        index = pd.Index(run.steps, name="step")
        return pd.DataFrame(run.series(str(table.name)), index=index, columns=list(run.layers))
    if table.form == "scalar":
        scalar = run.scalars[str(table.name)]
        return pd.DataFrame({table.name: scalar.values}, index=pd.Index(scalar.steps, name="step"))
    layers = pd.Categorical.from_codes(np.tile(np.arange(len(run.layers)), len(run.steps)), list(run.layers))
    values = {name: run.series(name).ravel() for name in table.columns}
    return pd.DataFrame({"step": np.repeat(run.steps, len(run.layers)), "layer": layers, **values})


def to_parquet(run: Run, path: str | os.PathLike[str], wanted: Wanted = None) -> Path:
    """Write a table as Parquet; what is not known is null, and the file says what the quantities are.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     to_parquet(run, f"{folder}/first.parquet").name
    'first.parquet'
    """
    pa, parquet = _needed("pyarrow", "Parquet"), _needed("pyarrow.parquet", "Parquet")
    table = Table.of(run, wanted)
    fields = [("step", pa.int64())]
    if table.form == "long":
        fields.append(("layer", pa.dictionary(pa.int32(), pa.string())))
    number = pa.float64() if table.form == "scalar" else pa.float32()
    described = {name: [about.unit, about.meaning] for name, about in run.quantities.items()}
    about = json.dumps({"run": run.name, "meta": run.meta, "quantities": described, "shown": table.name})
    fields = pa.schema([*fields, *((column, number) for column in table.columns)], metadata={"gyroscope": about})
    with whole(path) as part, parquet.ParquetWriter(part, fields) as out:
        for steps, columns in table.pieces():
            arrays: list[Any] = [pa.array(np.repeat(steps, len(run.layers) if table.form == "long" else 1))]
            if table.form == "long":
                codes = np.tile(np.arange(len(run.layers), dtype=np.int32), len(steps))
                arrays.append(pa.DictionaryArray.from_arrays(codes, list(run.layers)))
            arrays += (pa.array(np.ravel(column), type=number, from_pandas=True) for column in columns.values())
            out.write_table(pa.Table.from_arrays(arrays, schema=fields))
    return Path(path)


def _needed(module: str, what: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise MissingExtraError(
            f"{what} needs {library}, which is not installed: pip install 'gyroscope[export]'"
        ) from None
