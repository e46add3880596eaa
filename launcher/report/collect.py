"""All that a page shows of one run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.facts.processes import RUNNING
from launcher.facts.summary import Summary, current_summary, written_summary
from launcher.report import events as event_log
from launcher.report import findings, history, learned
from launcher.report.events import Events
from launcher.report.findings import Remark
from launcher.report.history import History
from launcher.report.learned import Learned
from p2pfl.run_folder import records
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.records import mapping

SKIPPED = "left out by --without-models"


@dataclass(frozen=True)
class ReportedRun:
    """One run.

    Attributes:
        settings: the run file as plain, unchecked values.
        run_file: its text.
        order: the peers by group, then by id, as in the rows and columns of matrices.
    """

    folder: RunFolder
    summary: Summary
    settings: dict[str, Any]
    run_file: str
    info: dict[str, Any]
    history: History
    events: Events
    learned: Learned
    findings: list[Remark]

    @property
    def groups(self) -> dict[int, int | None]:
        """The group of each peer, as far as known."""
        found = {peer.peer: peer.group for peer in self.summary.peers}
        if self.learned.partition is not None:
            found |= {peer["peer"]: peer["group"] for peer in self.learned.partition["peers"]}
        return found

    @property
    def order(self) -> list[int]:
        groups = self.groups
        return sorted(groups, key=lambda peer: (groups[peer] is None, groups[peer] or 0, peer))


def collect(folder: RunFolder, *, models: bool = True) -> ReportedRun:
    """Read a run.

    Args:
        models: also load its data and evaluate its checkpoints.

    Raises:
        RunFolderError: the run file, run.json or a result cannot be read.
    """
    summary = read_summary(folder)
    recorded = history.read(records.read(folder), summary.attacks)
    logged = event_log.read(folder)
    skipped = Learned(absent=dict.fromkeys(("partition", "confusion", "points"), SKIPPED))
    found = learned.read(folder) if models else skipped
    return ReportedRun(
        folder=folder,
        summary=summary,
        settings=folder.settings,
        run_file=folder.run_file.read_text(encoding="utf-8"),
        info=folder.info,
        history=recorded,
        events=logged,
        learned=found,
        findings=findings.find(summary, recorded, found),
    )


def read_summary(folder: RunFolder) -> Summary:
    """Summarize a run and leave summary.json as it is: its launcher knew by which signal a peer died."""
    summary = current_summary(folder)
    written = written_summary(folder).get("peers")
    known = {
        peer.get("peer"): peer.get("ended") for peer in map(mapping, written if isinstance(written, list) else ())
    }
    peers = [
        replace(peer, ended=str(known[peer.peer]))
        if peer.ended == "died" and known.get(peer.peer) not in (None, RUNNING)
        else peer
        for peer in summary.peers
    ]
    return replace(summary, peers=peers)
