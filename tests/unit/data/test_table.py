"""Tables: CSV and Parquet files with a sample in each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pfl.data import DATASETS, Dataset, open_dataset
from p2pfl.errors import DataError, RunFileError
from p2pfl.inputs import Tokens
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import load
from p2pfl.session.build import load_data

CSV = """\
age,height,city,hospital,outcome
30,1.5,x,3,ill
40,1.75,y,3,healthy
50,2,x,11,ill
60,1.5,y,11,healthy
20,1.25,x,3,ill
30,1.25,y,3,healthy
"""

RUN = """\
name: table
peers: 2
rounds: 1
data:
  dataset: {name: table, path: okk.csv, label: y}
  partition: iid
models: mlp-8
algorithm: local
device: cpu
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(**options: object) -> Dataset:
    return open_dataset("table", DATASETS["table"].parse({"label": "y", **options}), Path.cwd(), download=False)


def table(*labels: str, name: str = "t.csv", times: int = 5) -> str:
    """Write rows with a feature that does not number them and these labels; return the name of the file."""
    Path(name).write_text("a,y\n" + "".join(f"{k * k - 9},{label}\n" for k in range(times) for label in labels))
    return name


# ---- features and splits -------------------------------------------------------------------------------------


def test_each_class_is_split_and_groups_are_no_features() -> None:
    Path("patients.csv").write_text(CSV)
    dataset = opened(path="patients.csv", label="outcome", groups=["city", "hospital"], test=0.34)
    assert dataset.classes == 2
    assert dataset.train.images.tolist() == [[30.0, 1.5], [40.0, 1.75], [50.0, 2.0], [60.0, 1.5]]
    assert dataset.train.labels.tolist() == [1, 0, 1, 0]
    assert dataset.class_names == ("healthy", "ill")
    assert dataset.test.images.tolist() == [[20.0, 1.25], [30.0, 1.25]]
    hospital = dataset.columns["hospital"]
    assert hospital.values == ("3", "11")  # numbers in their order
    assert (hospital.train.tolist(), hospital.test.tolist()) == ([0, 0, 1, 1], [0, 0])
    assert dataset.columns["city"].values == ("x", "y")
    assert dataset.notes == ()


def test_test_samples_may_be_in_another_file() -> None:
    Path("train.csv").write_text("a,b,y\n1,2,7\n3,4,9\n")
    Path("test.csv").write_text("y,b,a\n9,6,5\n")
    dataset = opened(path="train.csv", test="test.csv")
    assert dataset.test.images.tolist() == [[5.0, 6.0]]
    assert (dataset.train.labels.tolist(), dataset.test.labels.tolist()) == ([0, 1], [1])


def test_samples_are_series_or_tokens() -> None:
    with pytest.raises(OptionErrors, match="give channels or vocabulary, not both"):
        opened(path="t.csv", channels=2, vocabulary=9)
    Path("t.csv").write_text("a,b,c,d,y\n" + "1,2,3,4,0\n" * 5)
    assert opened(path="t.csv", channels=2).train.images[0].tolist() == [[1, 2], [3, 4]]
    words = opened(path="t.csv", vocabulary=9)
    assert (words.channels, words.size) == (9, Tokens((4,)))
    assert opened(path="t.csv", features=["d", "a"]).train.images[0].tolist() == [4, 1]


# ---- labels and groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("01", "02", "1"), ("01", "02", "1")),
        (("1_0", "10", "1e3", "1000"), ("10", "1000", "1_0", "1e3")),
        (("007", "7", "+7", "-0", "0"), ("+7", "-0", "0", "007", "7")),
        (("TRUE", "true"), ("TRUE", "true")),
        (("1", "\u0661"), ("1", "\u0661")),  # a digit that is not in ASCII
        (("9", "10", "x2"), ("10", "9", "x2")),
        (("9", "10", "-1"), ("-1", "9", "10")),
        (("5", "123456789012345678901234567890"), ("5", "123456789012345678901234567890")),
        ((" b ", "a"), ("a", "b")),
        (("2.0", "1"), ("1", "2.0")),
    ],
)
def test_labels_are_classes_by_their_text(labels: tuple[str, ...], names: tuple[str, ...]) -> None:
    dataset = opened(path=table(*labels))
    assert dataset.class_names == names
    texts = [names[label] for label in [*dataset.train.labels, *dataset.test.labels]]
    assert sorted(texts) == sorted(5 * [label.strip() for label in labels])


@pytest.mark.parametrize("other", ["A1", "1", "1e3"])
def test_a_label_is_the_same_class_in_all_files_whatever_else_they_hold(other: str) -> None:
    dataset = opened(path=table("01", "02"), test=table("01", "02", other, name="test.csv"))
    assert dataset.classes == 3
    assert set(dataset.class_names) == {"01", "02", other}
    assert dataset.train.labels[0] == dataset.test.labels[0] == dataset.class_names.index("01")
    assert f"test samples, but no training samples of class {other}" in dataset.notes


def test_values_of_groups_are_told_apart_by_their_text() -> None:
    text = "a,h,y\n" + "".join(f"{k * k},{h},{k % 2}\n" for k in range(4) for h in ("01", "1", "1_0", "10"))
    Path("t.csv").write_text(text)
    dataset = opened(path="t.csv", groups=["h"], test=0.5)
    assert dataset.columns["h"].values == ("01", "1", "10", "1_0")
    assert dataset.notes == ("the values of h '01' and '1' are different ones: text counts",)


def test_files_whose_labels_are_written_differently_are_an_error() -> None:
    with pytest.raises(DataError, match=r"no class in common, e\.g\. '0' and '0\.0'; write the labels of both"):
        opened(path=table("0", "1"), test=table("0.0", "1.0", name="test.csv"))


@pytest.mark.parametrize("label", ["nan", "NaN", "NA", "null", "None", "<NA>", "inf", "-Infinity"])
def test_a_missing_or_infinite_label_is_located(label: str) -> None:
    with pytest.raises(DataError, match=rf"t\.csv:4: the label is '{label}', which is a missing value or no finite"):
        opened(path=table("0", "1", label))


def test_a_missing_label_in_the_file_with_the_test_samples_is_located() -> None:
    with pytest.raises(DataError, match=r"test\.csv:4: the label is 'nan'"):
        opened(path=table("0", "1"), test=table("0", "1", "nan", name="test.csv"))


def test_a_missing_group_is_located() -> None:
    Path("t.csv").write_text("a,h,y\n1,x,0\n\n2,NA,1\n")
    with pytest.raises(DataError, match=r"t\.csv:4: column 'h' is 'NA', which is a missing value"):
        opened(path="t.csv", groups=["h"])


def test_measurements_are_no_labels_in_any_file() -> None:
    with pytest.raises(DataError, match=r"test\.csv:4: labels must be classes: integers or text, not 0\.5"):
        opened(path=table("0", "1"), test=table("0", "1", "0.5", name="test.csv"))
    assert opened(path=table("0.5", "x")).class_names == ("0.5", "x")


# ---- columns that are no features ----------------------------------------------------------------------------


def numbered(header: str, index: Any, name: str = "t.csv") -> str:
    rows = "".join(f"{index(k)},{k * k},{k % 2}\n" for k in range(20))
    Path(name).write_text(f"{header},a,y\n{rows}")
    return name


@pytest.mark.parametrize(
    ("header", "index", "note"),
    [
        ("", lambda k: k, "a column without a name is not used"),
        ("", lambda k: f"patient {k}", "a column without a name is not used"),
        ("Unnamed: 0", lambda k: 7 * k, "column 'Unnamed: 0' is not used"),
        ("index", lambda k: k, "column 'index' is not used"),
        ("index", lambda k: 100 - 7 * k, "column 'index' is not used"),
    ],
)
def test_the_index_of_a_pandas_table_is_no_feature(header: str, index: Any, note: str) -> None:
    dataset = opened(path=numbered(header, index))
    assert dataset.train.images[:3].tolist() == [[0], [1], [4]]
    assert len(dataset.notes) == 1
    assert note in dataset.notes[0]


def test_an_index_may_be_listed_as_a_feature() -> None:
    dataset = opened(path=numbered("Unnamed: 0", lambda k: k), features=["Unnamed: 0", "a"])
    assert (dataset.train.images[2].tolist(), dataset.notes) == ([2, 4], ())


@pytest.mark.parametrize("index", [lambda k: k, lambda k: k + 1, lambda k: 7 * k % 20])
def test_a_feature_that_numbers_the_rows_is_said(index: Any) -> None:
    dataset = opened(path=numbered("patient", index))
    assert dataset.train.images.shape == (16, 2)
    assert "the feature 'patient' numbers the rows" in dataset.notes[0]


@pytest.mark.parametrize("index", [lambda k: k // 2, lambda k: k + 0.5])
def test_a_feature_may_be_named_index(index: Any) -> None:
    dataset = opened(path=numbered("index", index))
    assert (dataset.train.images.shape, dataset.notes) == ((16, 2), ())


def test_a_separator_at_the_end_of_each_line_makes_no_feature() -> None:
    Path("t.csv").write_text("a,y,\n" + "4,0,\n7,1,\n" * 5)
    assert opened(path="t.csv").train.images.shape == (8, 1)


def test_the_label_is_no_feature() -> None:
    with pytest.raises(DataError, match="features lists the label, 'y'; remove it there"):
        opened(path=table("0", "1"), features=["a", "y"])


def test_values_that_are_not_used_may_be_missing() -> None:
    Path("t.csv").write_text("a,b,y\n" + "1,,0\n2,NA,1\n" * 5)
    assert opened(path="t.csv", features=["a"]).train.images.shape == (8, 1)


# ---- how files are written -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("t.csv", "a;b;y\n" + "1,5;2;0\n1,5;2;1\n" * 5, {"separator": ";", "decimal": ","}),
        ("t.csv", "a\tb\ty\n" + "1.5\t2\t0\n1.5\t2\t1\n" * 5, {"separator": "tab"}),
        ("t.tsv", "a\tb\ty\n" + "1.5\t2\t0\n1.5\t2\t1\n" * 5, {}),
        ("t.csv", "a|b|y\n" + "1.5|2|0\n1.5|2|1\n" * 5, {"separator": "|"}),
        ("t.csv", "a,b,y\n" + '"1,5",2,0\n"1,5",2,1\n' * 5, {"decimal": ","}),
        ("t.csv", "\ufeffa,b,y\r\n" + "1.5,2,0\r\n1.5,2,1\r\n" * 5, {}),
        ("t.csv", ' a , "b", y\n\n' + ' 1.5, "2", 0\n   \n 1.5, 2, "1"\n' * 5, {}),
        ("t.csv", "\na,b,y\r" + "1.5,2,0\r1.5,2,1\r" * 5, {}),
    ],
)
def test_files_may_be_written_in_many_ways(name: str, content: str, options: dict[str, str]) -> None:
    Path(name).write_bytes(content.encode())
    dataset = opened(path=name, **options)
    assert dataset.train.images.tolist() == [[1.5, 2.0]] * 8
    assert sorted(dataset.train.labels.tolist()) == [0] * 4 + [1] * 4


def test_files_may_be_in_utf_16_with_its_mark() -> None:
    Path("t.csv").write_bytes(("a,y\n" + "1,é\n2,b\n" * 5).encode("utf-16"))
    assert opened(path="t.csv").class_names == ("b", "é")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,y\n1,0\n2,é\n".encode("latin-1"), r"t\.csv:3: not in UTF-8: byte 0xe9; convert it, e\.g\. with `iconv"),
        ("a,y\n1,0\n".encode("utf-16-le"), r"t\.csv:1: not a text in UTF-8; convert it"),
    ],
)
def test_files_in_other_encodings_are_errors(content: bytes, message: str) -> None:
    Path("t.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        opened(path="t.csv")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,y\n1\n", {}, r"t\.csv:2: 1 values for 2 columns; the row begins with '1'"),
        ("a,y\n1,0,5\n", {}, r"t\.csv:2: 3 values for 2 columns"),
        ("a,y\n1,0\n# by hand\n", {}, r"t\.csv:3: 1 values for 2 columns; the row begins with '# by hand'"),
        ("# by hand\na,y\n1,0\n", {}, r"t\.csv:1: expected the names of the columns, not '# by hand'; remove this"),
        ("sep=;\na;y\n1;0\n", {}, r"t\.csv:1: expected the names of the columns, not 'sep=;'; remove this line"),
        ("a,y\n1,0\n ,1\n", {}, r"t\.csv:3: column 'a' is empty"),
        ("a,y\n1,0\n1,\n", {}, r"t\.csv:3: column 'y' is empty"),
        ("a,a\n1,0\n", {}, r"t\.csv:1: expected the names of the columns, each once; 'a' occurs twice"),
        ("1.5,0\n2.5,1\n", {}, r"t\.csv:1: expected the names of the columns, not numbers: 1\.5, 0; insert a line"),
        ("1.5,0\n2.5,1\n", {"label": "0"}, r"t\.csv:1: expected the names of the columns, not numbers"),
        ("5.1,3,setosa\n4,2,setosa\n", {}, r"it has 5\.1, 3, setosa; is the first line, with the names, missing\?"),
        ("a,y\n", {}, r"t\.csv: no rows"),
        ("", {}, r"t\.csv:1: expected the names"),
        ('a,b,y\n1,2,"x\n3,4,z\n', {}, r"t\.csv:2: unreadable: unexpected end of data; are its quotes closed\?"),
        ("a,why\n1,0\n", {}, r"no column 'y'; it has a, why"),
        ("a,label\n1,0\n", {"label": "labl"}, "no column 'labl'; it has a, label; did you mean 'label'"),
        ("a,y\nred,0\n", {}, r"t\.csv:2: column 'a' has text, such as 'red'; list it in groups"),
        ("a,y\n1_0,0\n", {}, r"t\.csv:2: column 'a' has text, such as '1_0'"),
        ("a,y\n1,0\n?,0\n", {}, r"t\.csv:3: column 'a' has text, such as '\?'"),
        ("a,y\n1,0\nNA,0\n", {}, r"t\.csv:3: column 'a' is missing \(NA\); fill it in, or remove the row"),
        ("y\n0\n", {}, "no columns with features besides y"),
        (",y\n1,0\n", {}, "no columns with features besides y"),
        ("a,y\n1,0.5\n", {}, r"t\.csv:2: labels must be classes: integers or text, not 0.5"),
        ("a,b,y\n1,2,0\n", {"channels": 3}, "2 features are not a series of 3 channels"),
        ("a,y\n1.5,0\n", {"vocabulary": 3}, "tokens must be integers"),
        ("a,y\n" + "1,0\n" * 5 + "7,0\n" * 5, {"vocabulary": 3}, "tokens range from 1 to 7, but the vocabulary is 3"),
        ("a,b,y\n1,2,0\n\n2,nan,1\n", {}, r"t\.csv:4: column 'b' is nan, not a finite float32 number; replace it"),
        ("a,y\n1e200,0\n" + "1,0\n" * 9, {}, r"t\.csv:2: column 'a' is 1e\+200, not a finite float32 number"),
        (
            "a;y\n1,5;0\n",
            {},
            r"t\.csv:1: a single column, 'a;y'; .* set separator: ';'",
        ),
        ("a\ty\n1\t0\n", {}, r"set separator: tab"),
        ("a;b,c;y\n1;2,3;0\n", {}, r"no column 'y'; it has a;b, c;y; set separator to what separates the columns"),
        ("a,y\n1,0\n", {"separator": ";"}, r"a single column, 'a,y'; .* set separator: ','"),
        (
            "a;y\n1,5;0\n",
            {"separator": ";"},
            r"t\.csv:2: column 'a' is '1,5'; if that is a decimal comma",
        ),
        ('a,y\n"1,234,567",0\n', {}, r"t\.csv:2: column 'a' is '1,234,567'; remove what separates the thousands"),
        ("a;y\n1.234,5;0\n", {"separator": ";", "decimal": ","}, r"'1\.234,5'; remove what separates the thousands"),
        ("a;y\n1.234;0\n", {"separator": ";", "decimal": ","}, r"'1\.234'; remove what separates the thousands"),
        ("a;y\n1.5;0\n", {"separator": ";", "decimal": ","}, r"column 'a' is '1\.5', but decimal is ','; write all"),
    ],
)
def test_wrong_tables_are_errors(text: str, options: dict[str, Any], message: str) -> None:
    Path("t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        opened(**{"path": "t.csv", **options})


@pytest.mark.parametrize(("value", "found"), [("n/a", r"is missing \(n/a\)"), ("-inf", "is -inf, not a finite")])
def test_values_in_the_file_with_the_test_samples_are_located(value: str, found: str) -> None:
    Path("train.csv").write_text("a,b,y\n1,2,7\n3,4,9\n")
    Path("test.csv").write_text(f"a,b,y\n1,2,7\n3,{value},9\n")
    with pytest.raises(DataError, match=rf"test\.csv:3: column 'b' {found}"):
        opened(path="train.csv", test="test.csv")


def test_missing_table_error_names_both_folders_and_a_similar_file() -> None:
    Path("lab").mkdir()
    Path("lab/ok.csv").write_text("a,y\n1,0\n")
    Path("lab/run.yaml").write_text(RUN)
    places = f"looked in {Path('lab').absolute()} and {Path('root').absolute()}; did you mean 'ok.csv'"
    with pytest.raises(
        RunFileError, match=rf"run.yaml:5: data.dataset: table: missing okk.csv; {places}\? Set data.r"
    ):
        load_data(load(Path("lab/run.yaml"), overrides={"data.root": str(Path("root").absolute())}))


def test_table_of_another_type_is_an_error() -> None:
    Path("t.xls").write_text("")
    with pytest.raises(DataError, match=r"unknown type of table '\.xls'; known: \.csv, \.parquet, \.tsv"):
        opened(path="t.xls")


# ---- Parquet -------------------------------------------------------------------------------------------------


def test_options_of_csv_are_refused_for_parquet() -> None:
    for options in ({"separator": ";"}, {"decimal": ","}):
        with pytest.raises(OptionErrors, match="separator and decimal are for CSV files"):
            opened(path="t.parquet", **options)
    with pytest.raises(DataError, match=r"table: missing t\.parquet"):
        opened(path="t.parquet", test="t.csv", separator=";")


def write(path: str, **columns: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_parquet_gives_the_same_dataset_as_csv() -> None:
    pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    from pyarrow import csv, parquet

    Path("t.csv").write_text(CSV)
    parquet.write_table(csv.read_csv("t.csv"), "t.parquet")
    options = {"label": "outcome", "groups": ["city", "hospital"], "test": 0.34}
    one, two = (opened(path=path, **options) for path in ("t.csv", "t.parquet"))
    assert np.array_equal(one.train.images, two.train.images)
    assert np.array_equal(one.test.labels, two.test.labels)
    assert two.columns["hospital"].values == ("3", "11")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"zip": ["01234", "56789"], "y": [0, 1]}, r"row 1: column 'zip' has text, such as '01234'"),
        ({"a": [1, None], "y": [0, 1]}, r"row 2: column 'a' has 1 missing values"),
        ({"a": [1, 2], "y": [0.0, float("nan")]}, r"row 2: the label is 'nan'"),
        ({"a": [1, 2], "y": [0.25, 1.0]}, r"row 1: labels must be classes: integers or text, not 0\.25"),
    ],
)
def test_wrong_parquet_is_located(columns: dict[str, Any], message: str) -> None:
    write("t.parquet", **columns)
    with pytest.raises(DataError, match=rf"t\.parquet: {message}"):
        opened(path="t.parquet")


@pytest.mark.parametrize("other", [[2.0, 10.0, 9.0], ["2", "10", "9"]])
def test_a_label_is_the_same_class_in_files_of_other_types(other: list[Any]) -> None:
    write("t.parquet", a=[1.0, 5.0, 2.0], y=[2, 10, 9])
    write("test.parquet", a=[1.0, 5.0, 2.0], y=other)
    dataset = opened(path="t.parquet", test="test.parquet")
    assert dataset.class_names == ("2", "9", "10")
    assert dataset.train.labels.tolist() == dataset.test.labels.tolist() == [0, 2, 1]


def test_booleans_and_categories_are_classes_by_their_text() -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    for labels, names in (
        ([True, False] * 5, ("False", "True")),
        (pyarrow.array(["b", "01"] * 5).dictionary_encode(), ("01", "b")),
    ):
        write("t.parquet", a=[float(k * k) for k in range(10)], y=labels)
        assert opened(path="t.parquet").class_names == names


def test_the_index_of_a_pandas_table_in_parquet_is_a_group_but_no_feature() -> None:
    pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [float(k * k) for k in range(8)], "y": [0, 1] * 4, "ward": [3, 3, 5, 5] * 2})
    frame.set_index("ward").to_parquet("t.parquet")
    dataset = opened(path="t.parquet", test=0.25)
    assert dataset.train.images.shape == (6, 1)
    assert "column 'ward' is not used" in dataset.notes[0]
    assert opened(path="t.parquet", test=0.25, groups=["ward"]).columns["ward"].values == ("3", "5")
