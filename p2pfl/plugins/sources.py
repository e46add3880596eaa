"""Find the sources of plug-ins: a Python file or package beside the run file, or an installed module.

A file counts with everything that it imports from the same folder. What is hashed is what runs: sources are read
once, hashed, and executed from memory (p2pfl/plugins/loading.py). A run folder keeps them in its subfolder
``plugins``, from where its peers load them again; code is never received from a peer.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from p2pfl.errors import PluginError, RunFolderError
from p2pfl.options import OptionErrors, did_you_mean
from p2pfl.run_folder.folder import PLUGINS

NOWHERE = Path(os.devnull)
"""A folder without files, to find installed modules only."""
DEPENDENCIES = ("p2pfl", "torch", "torchvision", "numpy")
"""Packages that every installation of p2pfl has: models from them are not plug-ins."""

INSTALLED: set[str] = set()
"""Folders, or files, of the installed plug-ins that were found."""


@dataclass(frozen=True)
class Plugin:
    """Code from outside that a run uses.

    Attributes:
        name: of the module, e.g. ``my_method`` or ``my_package.module``.
        sha256: of all its sources.
        version: of the installed distribution; None for a file.
        root: the folder that its paths are relative to.
        sources: {path: content} of the files to copy; empty for an installed module.
    """

    name: str
    sha256: str
    version: str | None = None
    root: Path = field(default=Path(), compare=False)
    sources: Mapping[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def to_dict(self) -> dict[str, str]:
        version = {} if self.version is None else {"version": self.version}
        return {"name": self.name, "sha256": self.sha256, **version}

    @property
    def tops(self) -> set[str]:
        """The files and folders that hold its sources, relative to ``root``."""
        return {Path(path).parts[0] for path in self.sources}


# ---- find the sources ----------------------------------------------------------------------------------------


def find(name: str, base: Path) -> Plugin:
    """Find a plug-in: a path that ends in .py, or a module, beside the run file or installed.

    Args:
        base: the folder that relative paths start from. Its subfolder ``plugins`` is searched too.

    Raises:
        OptionErrors: there is none.
        PluginError: one of its files is not Python code.
    """
    if name.endswith(".py"):
        for path in (base / os.path.expanduser(name), base / PLUGINS / Path(name).name):
            if os.path.isfile(path):
                if not path.stem.isidentifier():
                    raise OptionErrors(
                        [((), f"{path.name!r} is not a module name; use letters, digits and '_' only")]
                    )
                return _local(path.stem, path.parent)
        there = [file.name for file in sorted((base / name).parent.glob("*.py"))]
        raise OptionErrors([((), f"no file {name!r} in {base.absolute()}{did_you_mean(Path(name).name, there)}")])
    for root in (base, base / PLUGINS):
        if source_of(root, name) is not None:
            return _local(name, root)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or spec.origin is None:
        there = [file.stem for file in sorted(base.glob("*.py"))]
        text = f"no module {name!r} in {base.absolute()}, and none is installed"
        raise OptionErrors([((), text + did_you_mean(name, there))])
    return _installed(name)


def source_of(root: Path, module: str) -> Path | None:
    """Return the file of a module below ``root``."""
    path = root.joinpath(*module.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((candidate for candidate in candidates if os.path.isfile(candidate)), None)


def _local(name: str, root: Path) -> Plugin:
    sources: dict[str, bytes] = {}
    waiting = [name.partition(".")[0]]
    while waiting:
        for path in _files(root, waiting.pop()):
            relative = str(path.relative_to(root))
            if relative in sources:
                continue
            try:
                sources[relative] = path.read_bytes()
            except OSError as error:
                raise PluginError(str(path), 1, f"cannot be read: {error.strerror}") from None
            waiting += [top for top in _imports(path, sources[relative]) if _is_beside(root, top)]
    return Plugin(name, sha256_of(sources), None, root, dict(sorted(sources.items())))


def _files(root: Path, top: str) -> list[Path]:
    """Return the files of a top-level module or package."""
    file, folder = root / f"{top}.py", root / top
    if file.is_file():
        return [file]
    hidden = (
        path for path in folder.rglob("*.py") if not any(part[0] in "._" for part in path.parts[len(root.parts) : -1])
    )
    return sorted(hidden)


def _imports(path: Path, source: bytes) -> set[str]:
    """Return the top-level modules that a file imports, at any place in it."""
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise PluginError(str(path), line, f"{type(error).__name__}: {getattr(error, 'msg', error)}") from None
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def _is_beside(root: Path, top: str) -> bool:
    """Return whether a file that imports ``top`` means what lies beside it, not a library. Raises PluginError."""
    file = next(filter(os.path.isfile, (root / f"{top}.py", root / top / "__init__.py")), None)
    if file is None or top in sys.stdlib_module_names or top in DEPENDENCIES:
        return False
    folder = imported_elsewhere(root, top)
    if folder is not None and not is_installed(folder):
        raise PluginError(str(file), 1, other_module(top, folder))
    return folder is None


def other_module(top: str, folder: Path) -> str:
    """Describe the error that this program has imported another module of that name."""
    return (
        f"this program has imported another module {top!r} from {folder}, whose code differs; rename one of them, or "
        "use a new Python process that does not import it"
    )


def is_library(root: Path, top: str) -> bool:
    """Return whether ``top`` is a module of Python, or was imported from elsewhere with other content."""
    return top in sys.stdlib_module_names or top in DEPENDENCIES or imported_elsewhere(root, top) is not None


def imported_elsewhere(root: Path, top: str) -> Path | None:
    """Return the folder of another imported module called ``top``, unless a plug-in has imported it; None if none.

    A script may have imported the original of the copy in a run folder: a module with equal content does not count.
    """
    known = sys.modules.get(top)
    if known is None or getattr(known, "__spec__", None) is None or getattr(known.__loader__, "plugin", False):
        return None
    origin = Path(known.__file__ or next(iter(getattr(known, "__path__", ())), "/")).absolute()
    folder = origin.parent if known.__file__ is None or not hasattr(known, "__path__") else origin.parent.parent
    if origin.is_relative_to(root.absolute()) or _contents(folder, top) == _contents(root, top):
        return None
    return folder


def is_installed(folder: Path) -> bool:
    """Return whether modules in this folder are installed packages."""
    return not {"site-packages", "dist-packages"}.isdisjoint(folder.parts)


def _contents(root: Path, top: str) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in _files(root, top)}


def sha256_of(sources: Mapping[str, bytes]) -> str:
    sha = hashlib.sha256()
    for path, content in sorted(sources.items()):
        sha.update(f"{path}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()


def _installed(name: str) -> Plugin:
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(top)
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = {path: path.relative_to(root) for root in map(Path, roots) for path in root.rglob("*.py")}
    if not files and spec is not None and spec.origin is not None:
        files = {Path(spec.origin): Path(f"{top}.py")}
    INSTALLED.update(str(root) for root in (roots or files))
    distributions = metadata.packages_distributions().get(top)
    version = metadata.version(distributions[0]) if distributions else "unknown"
    return Plugin(name, sha256_of({str(key): path.read_bytes() for path, key in files.items()}), version)


def copy(plugins: Iterable[Plugin], folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the files to write below the run folder ``folder``. Raises RunFolderError if two plug-ins clash."""
    written: dict[Path, bytes] = {}
    for plugin in plugins:
        for path, content in plugin.sources.items():
            target = folder / PLUGINS / path
            if written.setdefault(target, content) != content:
                raise RunFolderError(f"two plug-ins have different files {path!r}; rename one")
    yield from written.items()
