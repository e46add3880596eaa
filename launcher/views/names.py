"""``p2pfl names``: what a run file can name, built in or by plug-ins."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from p2pfl.options import OptionErrors, Options, notes, unknown
from p2pfl.plugins import TABLES

KEYS = {
    "algorithm": "algorithm",
    "model": "models",
    "backbone": "models",
    "head": "models: BACKBONE+HEAD",
    "dataset": "data.dataset",
    "partition": "data.partition",
    "augmentation": "data.augment",
    "graph": "graph",
    "metric": "metrics",
    "loss": "algorithm.loss",
}
"""The key of a run file whose value is such a name, by kind."""

FAMILIES = ("mlp-64-32", "conv1d-32-64", "embedding-64-32")
"""Examples of models with numbers in their names, which the table does not list."""


def kinds() -> list[dict[str, Any]]:
    """Return every kind with its key and its names; a model that is only a backbone is listed as that."""
    return [{"kind": kind, "key": KEYS[kind], "names": _names(kind)} for kind in TABLES]


def _names(kind: str) -> list[str]:
    hidden = TABLES["backbone"] if kind == "model" else ()
    return [name for name in TABLES[kind] if name not in hidden]


def find_kind(text: str) -> str:
    """Return a kind, which may be given in the plural. Raises OptionErrors with the known ones."""
    for kind in TABLES:
        if text in (kind, f"{kind}s", f"{kind}es"):
            return kind
    raise OptionErrors([((), unknown(text, TABLES, "kind"))])


def describe_kind(kind: str) -> list[dict[str, str]]:
    """Return name and summary of each name of a kind."""
    return [{"name": name, "summary": _summary(kind, TABLES[kind][name])} for name in _names(kind)]


def describe_name(kind: str, name: str) -> dict[str, Any]:
    """Return a name's summary and parameters. Raises OptionErrors for an unknown name."""
    value = TABLES[kind].find(name)
    options = getattr(value, "Hyper", value)
    has_options = inspect.isclass(options) and issubclass(options, Options)
    listed = [asdict(note) for note in notes(options)] if has_options else []
    return {"name": name, "summary": _summary(kind, value), "parameters": listed}


def _summary(kind: str, value: Any) -> str:
    if kind == "algorithm":
        return str(value.summary)
    if kind == "model":
        return f"a mixture of {', '.join(value.members)}" if len(value.members) > 1 else ""
    if not (inspect.isclass(value) or inspect.isfunction(value)) or value.__module__.startswith("torch."):
        return ""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())
