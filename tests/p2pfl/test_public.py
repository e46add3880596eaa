"""What the project promises about itself: complete tables, complete notes, and who may import whom."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import p2pfl.algorithms
from p2pfl import config, errors
from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.base import Algorithm
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS
from p2pfl.errors import P2pflError
from p2pfl.options import Options, Table, notes
from p2pfl.topology import GRAPHS

REPOSITORY = Path(__file__).resolve().parents[2]


# ---- tables ------------------------------------------------------------------------------------------------


def algorithm_modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(p2pfl.algorithms.__path__):
        yield importlib.import_module(f"p2pfl.algorithms.{found.name}")


def test_the_table_of_algorithms_lists_every_algorithm() -> None:
    defined = {
        thing
        for module in algorithm_modules()
        for thing in vars(module).values()
        if inspect.isclass(thing) and issubclass(thing, Algorithm) and thing.__module__ == module.__name__
        if not inspect.isabstract(thing)
    }
    assert set(ALGORITHMS.values()) == defined


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_says_where_it_comes_from(name: str) -> None:
    method = ALGORITHMS[name]
    assert method.name == name
    for attribute in ("title", "authors", "venue", "url"):
        text = getattr(method, attribute)
        assert isinstance(text, str)
        assert text.strip()
    assert method.url == "—" or method.url.startswith("https://")
    assert method.__doc__
    assert not inspect.isabstract(method)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_of_a_paper_names_its_title_and_address_at_the_top_of_its_file(name: str) -> None:
    method = ALGORITHMS[name]
    text = inspect.getmodule(method).__doc__  # type: ignore[union-attr]
    assert text
    if method.url != "—":
        assert method.url in text
        assert "Differs from the paper" in text
        assert " ".join(method.title.split()) in " ".join(text.replace("«", "").replace("»", "").split())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_has_a_page(name: str) -> None:
    assert (REPOSITORY / "docs" / "algorithms" / f"{name}.md").is_file()


TABLES: dict[str, Table[type[Options]]] = {
    "algorithm": Table("algorithm", {name: method.Hyper for name, method in ALGORITHMS.items()}),
    "graph": GRAPHS,
    "dataset": DATASETS,
    "partition": PARTITIONS,
    "augmentation": AUGMENTATIONS,
}
OPTIONS = [(f"{table}.{name}", options) for table, entries in TABLES.items() for name, options in entries.items()]


@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in OPTIONS])
def test_every_parameter_that_a_run_file_can_set_has_a_note(options: type[Options]) -> None:
    found = notes(options)
    assert tuple(note.name for note in found) == options.known()
    assert [note.name for note in found if not note.text] == []
    assert [note.name for note in found if not note.type] == []


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_entry_of_a_table_is_described_and_is_of_its_own(table: str) -> None:
    entries = TABLES[table]
    if table != "algorithm":  # some share their parameters
        assert len(set(entries.values())) == len(entries)
    for options in entries.values():
        assert issubclass(options, Options)
        if table != "algorithm":  # whose Hyper speaks for itself
            assert (options.__doc__ or "").strip()
            assert not (options.__doc__ or "").startswith(f"{options.__name__}(")  # what dataclasses write


@pytest.mark.parametrize("section", ["RunFile", "Data", "Models", "Transport", "Gpu"])
def test_every_key_of_the_run_file_has_a_note(section: str) -> None:
    model = getattr(config, section)
    obvious = {"rounds", "peers", "data", "models", "algorithm", "transport", "device", "gpu"}
    bare = {name for name, field in model.model_fields.items() if not field.description}
    assert bare <= (obvious if section == "RunFile" else set())


# ---- errors ------------------------------------------------------------------------------------------------


def drawn_tree() -> dict[str, str]:
    """{class: class above it} as drawn in the docstring of p2pfl.errors."""
    above: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        stripped = line.lstrip(" │├└─")
        name = stripped.split(" ")[0]
        if not hasattr(errors, name) or not name[:1].isupper():
            continue
        depth = len(line) - len(stripped)
        path = [(at, one) for at, one in path if at < depth]
        if path:
            above[name] = path[-1][1]
        path.append((depth, name))
    return above


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    defined = {
        name: thing.__bases__[0].__name__
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, P2pflError) and thing is not P2pflError
    }
    assert drawn_tree() == defined
    assert all(len(getattr(errors, name).__bases__) == 1 for name in defined)


def test_every_error_says_in_its_docstring_what_it_means() -> None:
    for name in (*drawn_tree(), "P2pflError"):
        assert getattr(errors, name).__doc__


# ---- who imports whom --------------------------------------------------------------------------------------

FORBIDDEN = {
    "p2pfl": {"zmq", "click", "rich", "peers", "launcher"},
    "launcher": {"peers", "zmq", "torch"},
    "peers": {"launcher"},
}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, also inside functions, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports here name the whole module"
            yield node.module or "", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            yield ast.unparse(node.args[0]).strip("'\""), node.lineno


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    files = sorted((REPOSITORY / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {module}"
        for path in files
        for module, line in imports(path)
        if module.partition(".")[0] in FORBIDDEN[package]
    ]
    assert wrong == []


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "import a.b, c as d\n"
        "from e.f import g\n"
        "if TYPE_CHECKING:\n    import h\n"
        "def f():\n    from i import j\n    importlib.import_module('k.l')\n"
    )
    assert sorted(imports(path)) == [("a.b", 1), ("c", 1), ("e.f", 2), ("h", 4), ("i", 6), ("k.l", 7)]


# ---- the time of day ---------------------------------------------------------------------------------------

WALL_CLOCK = {
    ("launcher/collect.py", "datetime.now"): "when something was collected, for people: in run.json",
    ("launcher/prepare.py", "datetime.now"): "when the run was started, for people: in its name and in run.json",
    ("p2pfl/about.py", "datetime.now"): "when the run was started, for people: in run.json",
    ("launcher/sources.py", "st_mtime_ns"): "copied with the file, for people",
    ("p2pfl/data/datasets.py", "st_mtime_ns"): "whether a file is the one that was decoded: equal or not",
    ("peers/sockets.py", "st_mtime_ns"): "whether an address has changed: equal or not",
}
"""Where the wall clock is read, and what for. It may jump by years in either direction; no wait and no decision may
depend on it. (logging stamps its lines with it.)"""

READS_THE_WALL_CLOCK = {
    *("time", "time_ns", "localtime", "gmtime", "ctime", "clock_gettime", "clock_gettime_ns", "strftime", "asctime"),
    *("st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "st_atime", "st_atime_ns", "getmtime", "getctime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today", "create_time", "boot_time"),
}


def readings_of_the_wall_clock(path: Path) -> Iterator[str]:
    """Calls and attributes that give a time which somebody can set."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    from_time = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and from_time.get(node.id) in READS_THE_WALL_CLOCK:
            yield from_time[node.id]
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            last = next((two for two in READS_THE_WALL_CLOCK if "." in two and whole.endswith(two)), node.attr)
            clock = whole.startswith("loop.") or whole.endswith("get_running_loop().time")  # it is monotonic
            if last in READS_THE_WALL_CLOCK and not clock:
                yield last


def test_the_reader_of_clocks_sees_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "from time import time as t, monotonic\nimport time, datetime\n"
        "t(); monotonic(); time.time(); time.monotonic(); datetime.datetime.now(); file.stat().st_mtime\n"
        "asyncio.get_running_loop().time(); loop.time()\n"
    )
    assert sorted(readings_of_the_wall_clock(path)) == ["datetime.now", "st_mtime", "time", "time"]


def test_nobody_relies_on_the_wall_clock() -> None:
    found = {
        (str(path.relative_to(REPOSITORY)), reading)
        for package in FORBIDDEN
        for path in (REPOSITORY / package).rglob("*.py")
        for reading in readings_of_the_wall_clock(path)
    }
    assert found == WALL_CLOCK.keys()


# ---- nothing that was received or downloaded is run ----------------------------------------------------------

UNSAFE = {
    **dict.fromkeys(("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"), "unpickles"),
    **dict.fromkeys(("eval", "exec", "compile"), "runs text"),
    **dict.fromkeys(
        ("torch.load", "torch.hub", "torch.package", "torch.jit.load", "pandas.read_pickle"), "unpickles"
    ),
    **dict.fromkeys(("np.load", "numpy.load"), "unpickles if it is told to"),
    **dict.fromkeys(("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"), "makes what YAML names"),
    **dict.fromkeys(("multiprocessing", "zmq.utils.jsonapi", "send_pyobj", "recv_pyobj"), "pickles what it moves"),
    **dict.fromkeys(("loadmat",), "reads what scipy reads"),
}
"""What may run what it reads: modules, functions, methods."""

REASONS = {
    ("p2pfl/checkpoint.py", "torch.load"): "weights_only=True",
    ("p2pfl/config.py", "yaml.load"): "Loader=_Loader",  # a SafeLoader
    ("p2pfl/data/datasets.py", "np.load"): "mmap_mode='r'",  # allow_pickle is False by default, and cannot be mapped
    ("p2pfl/data/sources/own.py", "np.load"): "allow_pickle=False",
    ("benchmarks/pipeline.py", "np.load"): "mmap_mode='r'",
    ("p2pfl/data/sources/base.py", "loadmat"): "",  # MATLAB's format; Python objects do not exist in it
    ("benchmarks/claims/runner.py", "multiprocessing"): "",  # talks to a process that it has made
    ("benchmarks/dfml_memory.py", "multiprocessing"): "",
    ("benchmarks/capture.py", "multiprocessing"): "",  # forks: nothing is moved
    ("benchmarks/fuzz.py", "multiprocessing"): "",
    # CIFAR's files are pickles: read by an Unpickler that finds three stand-ins of our own, and nothing else.
    ("p2pfl/data/sources/classic.py", "pickle"): "",
}
"""Where it is used all the same, and what must stand in every such call."""


def unsafe_uses(path: Path) -> Iterator[tuple[str, int, str]]:
    """(what, line, the call) of each use of something in UNSAFE, however it was imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            for alias in node.names:
                if alias.name.partition(".")[0] in UNSAFE or alias.name in UNSAFE:
                    yield alias.name.partition(".")[0], node.lineno, ""
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
            if module.partition(".")[0] in UNSAFE:
                yield module.partition(".")[0], node.lineno, ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            first, dot, rest = called.partition(".")
            for name in {called, names.get(first, first) + dot + rest, called.rpartition(".")[2]}:
                plain = name.replace("numpy.", "np.")
                # The last part alone says enough of a method with a telling name; `load` and `eval` tell nothing.
                if name in UNSAFE and (
                    name == called or "." in name or name in ("loadmat", "send_pyobj", "recv_pyobj")
                ):
                    yield plain, node.lineno, ast.unparse(node)


def test_nothing_that_was_received_or_downloaded_is_run() -> None:
    found = set()
    wrong = []
    for package in (*FORBIDDEN, "benchmarks"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            where = path.relative_to(REPOSITORY).as_posix()
            for what, line, call in unsafe_uses(path):
                found.add((where, what))
                reason = REASONS.get((where, what))
                if reason is None or (call and reason not in call):
                    wrong.append(f"{where}:{line}: {what} {UNSAFE.get(what, '')}")
    assert wrong == []
    assert found == set(REASONS), "a reason whose use is gone"


def test_the_reader_of_unsafe_uses_sees_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "import pickle as p, marshal\n"
        "from torch import load as get, nn\n"
        "import torch as t\n"
        "def f(model):\n"
        "    get('x'); t.load('y'); eval('1'); model.eval(); model.load()\n"
        "    from numpy import load\n    load('z')\n    socket.recv_pyobj()\n"
    )
    assert sorted((what, line) for what, line, _ in unsafe_uses(path)) == [
        ("eval", 5), ("marshal", 1), ("np.load", 7), ("pickle", 1), ("recv_pyobj", 8), ("torch.load", 5),
        ("torch.load", 5),
    ]  # fmt: skip


def test_the_loader_of_run_files_makes_plain_values_only() -> None:
    assert issubclass(config._Loader, yaml.SafeLoader)
