"""Runs that are reported, and pages of reports as a browser reads them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import yaml

from launcher.report.collect import ReportedRun, collect
from p2pfl.run_folder.folder import RunFolder

HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>\x1b[31m'


def record(peer: int, t: int, **changes: Any) -> dict[str, Any]:
    return {
        "peer": peer,
        "t": t,
        "loss": {"ce": 2.0 - 0.1 * t, "proto": 1.0},
        "seconds": {"training": 1.0, "waiting": 2.0, "sending": 0.25, "queued": 0.5, "evaluating": 0.1, "total": 4.0},
        "elapsed": 4.0 * (t + 1),
        "sent": {str(1 - peer): {"Head": [1, 100, 10]}},
        "received": {},
        "missing": {},
        "weights": {"0": 0.75, "1": 0.25} if peer == 0 else {"0": 0.5, "1": 0.5},
        "personal": {"accuracy": 0.5 + 0.1 * t + 0.1 * peer},
        **changes,
    }


def change(folder: RunFolder, **keys: object) -> None:
    plain = yaml.safe_load(folder.run_file.read_text())
    folder.run_file.write_text(yaml.safe_dump({**plain, **keys}))


def read(folder: RunFolder) -> ReportedRun:
    return collect(folder, models=False)


class Page(HTMLParser):
    """Reads a page and checks that its elements are nested properly."""

    VOID = ("meta", "link", "input", "br", "img", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] = self.scripts[-1][0], self.scripts[-1][1] + data
        else:
            self.text += data

    def of(self, name: str) -> list[str]:
        return [value for _, attributes in self.attributes if (value := attributes.get(name)) is not None]
