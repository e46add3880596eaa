"""A run file that passed all checks, with every named thing resolved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pfl import PeerId, config_hash
from p2pfl.adversaries import Adversary
from p2pfl.aggregation import Rule, RuleList
from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.base import Algorithm
from p2pfl.attackers import drawn
from p2pfl.codecs import Codec
from p2pfl.data import Augmentation, Loader, Partition
from p2pfl.errors import DataError, Problem, RunFileError
from p2pfl.graphs import Graph, Schedule
from p2pfl.learning.gradients import GradientRule
from p2pfl.messaging.topology import Topology
from p2pfl.options import Loc, OptionErrors, Options
from p2pfl.paths import FILES
from p2pfl.plugins.loading import activate
from p2pfl.plugins.sources import Plugin, copy
from p2pfl.run_file.schema import Named, RunFile
from p2pfl.run_file.yaml_source import to_text


@dataclass(frozen=True)
class Run:
    """A checked run file.

    Attributes:
        file: the run file as written, with overrides applied.
        hyper: the algorithm's hyper-parameters.
        topology: the graph over which the peers connect; of a time-varying one, the union over all rounds.
        schedule: the graph of each round, if it changes.
        loader: loads the dataset.
        aggregation: how peers combine what they receive.
        gradient: how they draw batches and make their gradients.
        codecs: how messages are packed, by kind; ``ALL`` stands for all kinds that are not listed.
        attacks: what the peers in ``file.adversaries`` do, in the same order.
        plugins: code from outside that it uses.
        base: the folder of the run file.
        recommended: the run file leaves the aggregation rule open: ``auto``.
    """

    file: RunFile
    hyper: Options
    graph: Graph
    topology: Topology
    schedule: Schedule | None
    loader: Loader
    partition: Partition
    augmentation: Augmentation
    aggregation: Rule
    gradient: GradientRule
    codecs: Mapping[str, Codec]
    attacks: tuple[Adversary, ...]
    plugins: tuple[Plugin, ...]
    _locate: Callable[[Loc, str], Problem] = field(repr=False, compare=False)
    base: Path | None = field(default=None, repr=False, compare=False)
    recommended: bool = field(default=False, compare=False)

    def error_at(self, key: str, error: Exception) -> RunFileError:
        """Report an error found later at the line of ``key`` (dotted)."""
        return RunFileError([self._locate(tuple(key.split(".")), str(error))])

    def option_errors_at(self, key: str, errors: OptionErrors) -> RunFileError:
        """Report each problem in the options at ``key`` (dotted) at its line."""
        prefix = tuple(key.split("."))
        return RunFileError([self._locate((*prefix, *found.path), found.message) for found in errors.problems])

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def seed(self) -> int:
        return self.file.seed

    @property
    def rounds(self) -> int:
        return self.file.rounds

    @property
    def peers(self) -> int:
        return self.file.peers

    @property
    def algorithm(self) -> type[Algorithm[Any]]:
        return ALGORITHMS[self.file.algorithm.name]

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the aggregation rules, in order."""
        rule, name = self.aggregation, self.file.aggregation.name
        return tuple(member for member, _ in rule.members) if isinstance(rule, RuleList) else (name,)

    def attackers(self, number: int) -> frozenset[PeerId]:
        """Return the peers of an entry of ``adversaries``."""
        return drawn(self.file.adversaries[number].peers, number, self.peers, self.seed)

    def activate(self) -> None:
        """Put the names of this run's plug-ins into the tables; another one may have been loaded since."""
        activate(self.plugins)

    def copies(self, folder: Path) -> list[tuple[Path, bytes]]:
        """Return the files that a run folder keeps beside ``run.yaml``, of plug-ins and of the partition.

        Returns:
            Their paths below ``folder``, and their contents.
        """
        files = [
            (folder / FILES / path.name, self._read(path, "data.partition"))
            for path in self.partition.files().values()
        ]
        for key, path in self._files_of_time.items():
            files.append((folder / _copy_of(key), self._read(path, ".".join(("time", *key)))))
        return [*copy(self.plugins, folder), *files]

    @property
    def _files_of_time(self) -> Mapping[tuple[str, str], Path]:
        return self.file.time.files() if self.file.time is not None else {}

    def _read(self, path: Path, key: str) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.error_at(key, DataError(f"{path}: unreadable: {error.strerror}")) from None

    def resolved(self, *, portable: bool = False) -> dict[str, Any]:
        """The run as plain values with every default filled in; loading it gives an equal run.

        Args:
            portable: of paths in parameters only the last part, which is the same on all hosts, and hashes of the
                partition's files.
        """

        def section(named: Named, options: Options) -> dict[str, Any]:
            return {"name": named.name, **options.to_dict(portable=portable)}

        file = self.file
        plain = file.model_dump(mode="json", exclude={"codec", "adversaries", "synchrony"})
        plain["models"] = file.models.resolved(portable=portable)
        plain["plugins"] = [plugin.to_dict() for plugin in self.plugins]
        plain["graph"] = self.graph.resolved(file.graph.name, self.topology, self.schedule)
        plain["algorithm"] = section(file.algorithm, self.hyper)
        plain["aggregation"] = section(file.aggregation, self.aggregation)
        plain["gradient"] = section(file.gradient, self.gradient)
        data = plain["data"]
        data["dataset"] = section(file.data.dataset, self.loader)
        data["partition"] = section(file.data.partition, self.partition)
        for key, path in self.partition.files().items():
            data["partition"][key] = (
                hashlib.sha256(self._read(path, "data.partition")).hexdigest() if portable else f"{FILES}/{path.name}"
            )
        data["augment"] = section(file.data.augment, self.augmentation)
        for part, key in self._files_of_time:
            plain["time"][part][key] = str(_copy_of((part, key)))
        if file.synchrony.bound is not None:
            plain["synchrony"] = file.synchrony.short
        if self.codecs:
            plain["codec"] = {kind: section(file.codec[kind], codec) for kind, codec in self.codecs.items()}
        if self.attacks:
            plain["adversaries"] = [
                {
                    **entry.model_dump(mode="json", by_alias=True, include={"peers", "name", "first", "messages"}),
                    **attack.to_dict(portable=portable),
                }
                for entry, attack in zip(file.adversaries, self.attacks, strict=True)
            ]
        return plain

    def to_yaml(self) -> str:
        return to_text(self.resolved())

    def settings(self) -> dict[str, Any]:
        """Everything that determines the result, equal on all peers of one run, but the code of plug-ins."""
        plain = self.resolved(portable=True)
        del plain["plugins"]
        local = (
            *("name", "out", "transport", "chaos", "time", "slots", "gpu", "device", "eval_every", "metrics"),
            *("checkpoint_every", "checkpoint_copies", "track", "report"),
        )
        for key in local:
            plain.pop(key)
        plain["data"].pop("root")
        plain["data"].pop("download")
        return plain

    def config_hash(self, frozen: str | None = None) -> str:
        """SHA-256 over the settings, then the plug-ins; with ``frozen``, the hash of a model's frozen parameters."""
        settings = hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()
        more = {} if frozen is None else {config_hash.FROZEN: frozen}
        return config_hash.join(settings, {plugin.name: plugin.sha256 for plugin in self.plugins} | more)


def _copy_of(key: tuple[str, str]) -> Path:
    """Return where a run folder keeps the copy of a file that the section ``time`` names."""
    return Path(FILES, f"time-{'-'.join(key)}.csv")
