"""Import the example algorithm from docs/extending.md."""

from __future__ import annotations

import re
import sys
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


class Block(SourceLoader):
    """Load the page's Python block as a module."""

    def get_filename(self, fullname: str) -> str:
        return f"{PAGE}, python"

    def get_data(self, path: str | bytes) -> bytes:
        (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        return str(text).encode()


def module() -> ModuleType:
    """Return the block as a module of p2pfl.algorithms; import it only once per process."""
    name = "p2pfl.algorithms.best_heads"
    if name not in sys.modules:
        spec = spec_from_loader(name, Block())
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
