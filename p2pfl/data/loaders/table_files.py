"""Read the rows of tables: CSV, or Parquet with the optional extra ``parquet``."""

from __future__ import annotations

import csv
import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pfl.data.columns import MISSING, number_of
from p2pfl.errors import DataError, MissingExtra
from p2pfl.options import did_you_mean

Array = npt.NDArray[Any]

SEPARATORS = {",": "','", ";": "';'", "|": "'|'", "\t": "tab"}
"""What separates the columns of CSV files, and how a run file names it."""
UNNAMED = re.compile(r"(Unnamed: \d+(_level_\d+)?)?")
"""The name of a column without one, as pandas writes and reads its index."""
INDEX = ("index", "level_0", "__index_level_0__")
"""What pandas calls an index without a name when it makes a column of it."""


class Rows(ABC):
    """The rows of a file.

    Attributes:
        path: the file.
        names: of the columns; several may be empty.
    """

    path: Path
    names: Sequence[str]

    @abstractmethod
    def values(self, name: str) -> Array:
        """Return a column, [N]: numbers, or text as objects. Raises DataError if a value is missing."""

    @abstractmethod
    def place(self, row: int) -> str:
        """Return where a row, counted from 0, is in the file."""

    def numbers(self, name: str) -> Array:
        """Return a column, [N], of numbers that float32 can hold. Raises DataError naming the first that is none."""
        values = self._numbers(name)
        wrong = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))
        if len(wrong):
            value = float(values[wrong[0]])
            text = f"column {name!r} is {value}, not a finite float32 number; replace it, or remove the row"
            raise DataError(f"{self.place(int(wrong[0]))}: {text}")
        return values

    @abstractmethod
    def _numbers(self, name: str) -> Array: ...

    def require(self, name: str) -> None:
        """Raise DataError if there is no such column."""
        if name not in self.names:
            shown = [each for each in self.names if each]
            hint = did_you_mean(name, shown)
            if not hint and any(number_of(each) is not None for each in shown):
                hint = "; is the first line, with the names, missing?"
            if not hint and any(other in each for other in SEPARATORS for each in shown):
                hint = "; set separator to what separates the columns"
            raise DataError(f"{self.path}: no column {name!r}; it has {', '.join(shown)}{hint}")

    def is_index(self, name: str) -> bool:
        """Return whether a column has no name, or is the index of a pandas table."""
        if UNNAMED.fullmatch(name) is not None or name not in INDEX:
            return UNNAMED.fullmatch(name) is not None
        try:
            values = self.numbers(name)
        except DataError:
            return False
        return np.array_equal(values, np.rint(values)) and len(np.unique(values)) == len(values)


def numbers_rows(values: Array) -> bool:
    """Return whether numbers, [N], count from 0 or 1, in any order."""
    inorder = np.sort(values)
    return len(values) > 1 and inorder[0] in (0, 1) and bool((np.diff(inorder) == 1).all())


def open_rows(path: Path, separator: str | None, decimal: str) -> Rows:
    """Read a table.

    Args:
        separator: a key of SEPARATORS, for CSV; None: a tab in a .tsv, else a comma.
        decimal: the decimal point or comma of numbers, for CSV.

    Raises:
        DataError: naming file, line and column.
        MissingExtra: Parquet needs pyarrow.
    """
    match path.suffix.lower():
        case ".csv" | ".tsv" as suffix:
            return _Csv(path, separator or ("\t" if suffix == ".tsv" else ","), decimal)
        case ".parquet":
            return _Parquet(path)
        case suffix:
            raise DataError(f"{path}: unknown type of table {suffix!r}; known: .csv, .parquet, .tsv")


class _Csv(Rows):
    def __init__(self, path: Path, separator: str, decimal: str) -> None:
        self.path, self.names, self._decimal = path, (), decimal
        self._lines: list[int] = []
        rows: list[list[str]] = []
        reader = csv.reader(
            io.StringIO(_decoded(path), newline=""), delimiter=separator, skipinitialspace=True, strict=True
        )
        for line, row in _not_blank(path, reader):
            if not self.names:
                self.names = self._checked_names(line, row, separator)
                continue
            if len(row) != len(self.names):
                begins = repr(separator.join(row)[:40])
                found = f"{len(row)} values for {len(self.names)} columns"
                raise DataError(f"{path}:{line}: {found}; the row begins with {begins}")
            rows.append(row)
            self._lines.append(line)
        if not self.names:
            raise DataError(f"{path}:1: expected the names of the columns, each once, but the file is empty")
        if not rows:
            raise DataError(f"{path}: no rows")
        self._columns = dict(zip(self.names, zip(*rows, strict=True), strict=True))

    def _checked_names(self, line: int, names: Sequence[str], separator: str) -> Sequence[str]:
        where, first = f"{self.path}:{line}", names[0]
        if first.startswith("sep=") or (first.startswith("#") and len(names) == 1):
            raise DataError(f"{where}: expected the names of the columns, not {first!r}; remove this line")
        if twice := [name for name, times in Counter(names).items() if name and times > 1]:
            raise DataError(f"{where}: expected the names of the columns, each once; {twice[0]!r} occurs twice")
        others = [each for each in SEPARATORS if each in first and each != separator]
        if len(names) == 1 and others:
            other = SEPARATORS[max(others, key=first.count)]
            raise DataError(
                f"{where}: a single column, {first!r}; if the separator is another one, set separator: {other}"
            )
        numbers = [number_of(name) for name in names]
        if None not in numbers and numbers not in ([*range(len(names))], [*range(1, len(names) + 1)]):
            listed = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            raise DataError(
                f"{where}: expected the names of the columns, not numbers: {listed}; insert a line with names"
            )
        return names

    def values(self, name: str) -> Array:
        found = self._columns[name]
        if "" in found:
            raise DataError(f"{self.place(found.index(''))}: {_no_number(name, '')}")
        return np.array(found, dtype=object)

    def place(self, row: int) -> str:
        return f"{self.path}:{self._lines[row]}"

    def _numbers(self, name: str) -> Array:
        found: Sequence[str] = self._columns[name]
        if self._decimal == ",":  # a point then separates thousands, if anything
            found = [value.replace(",", ".") if "." not in value else "" for value in found]
        numbers = [number_of(value) for value in found]
        if None in numbers:
            row = numbers.index(None)
            raise DataError(f"{self.place(row)}: {_no_number(name, self._columns[name][row], self._decimal)}")
        return np.array(numbers, np.float64)


def _decoded(path: Path) -> str:
    """Read a file in UTF-8, or in UTF-16 if it has its byte order mark. Raises DataError."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: unreadable: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        remedy = f"convert it, e.g. with `iconv -f latin1 -t utf-8 {path.name}`"
        raise DataError(f"{path}:{line}: not in UTF-8: byte 0x{data[error.start]:02x}; {remedy}") from error
    if "\0" in text:
        raise DataError(f"{path}:{text.count(chr(10), 0, text.index(chr(0))) + 1}: not a text in UTF-8; convert it")
    return text


def _not_blank(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the values, without blanks around them, of each row that is not a blank line."""
    line = 1
    try:
        for row in reader:
            values = [value.strip() for value in row]
            if values and values != [""]:
                yield line, values
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{line}: unreadable: {error}; are its quotes closed?") from error


def _no_number(name: str, text: str, decimal: str = ".") -> str:
    """Say why a text is not a number, and what to do."""
    if text in MISSING:
        return f"column {name!r} is {'empty' if not text else f'missing ({text})'}; fill it in, or remove the row"
    if decimal == "." and re.fullmatch(r"[+-]?\d*,\d+", text):
        return f"column {name!r} is {text!r}; if that is a decimal comma, set decimal: ','; else remove the comma"
    if re.fullmatch(r"[+-]?\d{1,3}([.,'_ \u00a0\u202f]\d{3})+([.,]\d+)?", text):
        return f"column {name!r} is {text!r}; remove what separates the thousands"
    if decimal == "," and number_of(text) is not None:
        return f"column {name!r} is {text!r}, but decimal is ','; write all numbers in the same way"
    text = f"{text[:40]}…" if len(text) > 40 else text
    remedy = "list it in groups, or list only columns with numbers in features"
    return f"column {name!r} has text, such as {text!r}; {remedy}"


class _Parquet(Rows):
    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise MissingExtra("pyarrow", "parquet", f"{path}: reading Parquet") from None
        try:
            self._table = parquet.read_table(path)
        except (OSError, ArrowException) as error:
            raise DataError(f"{path}: unreadable: {' '.join(str(error).split())}") from error
        self.path, self.names = path, self._table.column_names
        if not len(self._table):
            raise DataError(f"{path}: no rows")
        self._index = (self._table.schema.pandas_metadata or {}).get("index_columns", [])

    def is_index(self, name: str) -> bool:
        return name in self._index or super().is_index(name)

    def values(self, name: str) -> Array:
        column = self._table.column(name)
        if column.null_count:
            first = self.place(column.is_null().to_pylist().index(True))
            text = f"column {name!r} has {column.null_count} missing values; fill or remove them"
            raise DataError(f"{first}: {text}")
        if hasattr(column.type, "value_type") and hasattr(column.type, "index_type"):  # pandas' categories
            column = column.cast(column.type.value_type)
        values = np.asarray(column.to_numpy())
        if values.dtype.kind == "O" and not all(isinstance(value, str) for value in values):
            raise DataError(f"{self.path}: column {name!r} has neither numbers nor text")
        if values.dtype.kind not in "fiubO":
            raise DataError(f"{self.path}: column {name!r} is {values.dtype}; expected numbers or text")
        return values

    def place(self, row: int) -> str:
        return f"{self.path}: row {row + 1}"

    def _numbers(self, name: str) -> Array:
        values = self.values(name)
        if values.dtype.kind == "O":
            raise DataError(f"{self.place(0)}: {_no_number(name, str(values[0]))}")
        return values.astype(np.float64)
