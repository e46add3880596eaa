"""The run file: everything one launch needs to know, typed and validated.

``load`` reads YAML, applies ``--set`` overrides, resolves every named thing (graph, partition, augmentation,
models, algorithm) against its table and checks what can be checked before a process is started. All problems
are reported at once, each as ``file:line: key: what was found; what is known``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from p2pfl import addresses, keys
from p2pfl.addresses import LAST_PORT, AddressBook
from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.base import Algorithm
from p2pfl.chaos import Chaos
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS, Augmentation, Partition, Source
from p2pfl.errors import P2pflError, Problem, RunFileError
from p2pfl.models import MODELS, architecture, has_linear_head, unknown_model
from p2pfl.net import Patience
from p2pfl.options import MISSING, Loc, OptionErrors, Options, Section, Table, explain, unknown_key
from p2pfl.runfolder import PeerId
from p2pfl.topology import GRAPHS, Graph, Topology


class Named(BaseModel):
    """A named thing with parameters: ``ring``, or ``{name: regular, degree: 4}``."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def given(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping | BaseModel):
        raise ValueError("should be a name, or a mapping with a name and its parameters")
    return value


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _with_text_keys(value: Any) -> Any:
    return {str(key): below for key, below in value.items()} if isinstance(value, Mapping) else value


def _run_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("should be made of letters, digits, '.', '_' and '-', and not begin with one of these three")
    return value


class Data(Section):
    """What the peers learn from."""

    dataset: Named
    """Which images, e.g. digits, mnist, fashion-mnist."""
    partition: Named = Named(name="iid")
    """Who gets which samples."""
    augment: Named = Named(name="none")
    """What happens to training images; methods with two views draw it twice."""
    root: Annotated[Path, AfterValidator(_absolute)] | None = None
    """Where the files lie; default $P2PFL_DATA, else a folder in the user's cache."""
    download: bool = True
    """Fetch missing files."""

    _short = field_validator("dataset", "partition", "augment", mode="before")(_named)


class Models(Section):
    """Which networks the peers train: peer m gets entry m mod len of the group."""

    name: str = "tiny4"
    """A group, e.g. tiny4, or one of the members of a group, which all peers have; ``p2pfl models`` lists them."""
    features: PositiveInt | None = None
    """Width d of the feature vector; default: the group's, or where it has none, each backbone's own."""


class Transport(Section):
    """How peers reach each other, and how long they wait."""

    host: str = "127.0.0.1"
    """Address that peers bind; 0.0.0.0 or "::" are all of the host's."""
    port: Annotated[int, Field(ge=1, le=LAST_PORT)] | None = None
    """Peer i binds port ``port`` + i; default: one that the system chooses."""
    address: str | None = None
    """Where peers are reached, if not where they bind, e.g. tcp://peer-{id}:{port}; see p2pfl/addresses.py."""
    hosts: Annotated[dict[str, str], BeforeValidator(_with_text_keys)] = Field(default={})
    """{peer or range of peers: host, or template of an address}, for these peers instead of ``address``."""
    keys: Annotated[Path, AfterValidator(_absolute)] | None = None
    """Folder with the keys that ``p2pfl keys new`` makes. With it, what peers say is encrypted, and they hear only
    neighbours, each known by its key. Needed as soon as ``host`` is heard beyond this host."""
    public_keys: dict[NonNegativeInt, str] | None = None
    """Public keys by peer, 64 hex digits each; default: those in public.yaml in ``keys``."""
    insecure: bool = False
    """Do without keys on a network: who is on it can read and change what peers say, and pose as one."""
    deadline: PositiveFloat = 600.0
    """Seconds that one wait for a neighbour's message may last while its link is up or not yet made."""
    adaptive: PositiveFloat | None = None
    """A wait also ends after so many times the median time of the last ten rounds, but lasts a second at least."""
    quorum: float = Field(default=0.0, ge=0.0, le=1.0)
    """The deadline ends a wait only if this share of the neighbours waited for has spoken, gone ones not counted;
    otherwise the wait goes on until so many have, for up to ``give_up`` seconds more."""
    give_up: PositiveFloat = 60.0
    """Seconds for which waits go on after a neighbour's link was lost: it may come back within that time."""
    queue: PositiveInt = 64
    """Messages per neighbour that may wait to be sent, and that may wait to be read."""
    max_message: PositiveInt = 1 << 30
    """Bytes of the largest message that is accepted."""

    @property
    def patience(self) -> Patience:
        return Patience(self.deadline, self.adaptive, self.quorum, self.give_up)

    def book(self, peers: int) -> AddressBook:
        """Where the ``peers`` of the run are reached."""
        return addresses.book(peers, self.port, self.address, self.hosts)


class Gpu(Section):
    """How peers share the GPUs of a host; peer i uses GPU i mod n."""

    peers_per_gpu: PositiveInt = 1
    """Peers that may compute on one GPU at the same time."""
    memory_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the GPU's memory that one peer may allocate; default 1 / (peers placed on that GPU)."""
    mps: bool = False
    """Run the peers under NVIDIA's Multi-Process Service, so that their kernels overlap."""


class RunFile(Section):
    """One launch, as the file says it. ``load`` makes it; ``Run`` adds what follows from it."""

    name: Annotated[str, AfterValidator(_run_name)]
    """Goes into the name of the run folder."""
    seed: int = Field(default=0, ge=0)
    """All randomness follows from it."""
    rounds: PositiveInt
    peers: PositiveInt
    graph: Named = Named(name="complete")
    """Who may talk to whom."""
    data: Data
    models: Models = Models()
    algorithm: Named
    joins_at: dict[NonNegativeInt, PositiveInt] = Field(default={})
    """{peer: round}: peers that take part from that round on only; the others from round 0."""
    transport: Transport = Transport()
    chaos: Chaos = Chaos()
    """Faults on purpose."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu: Gpu = Gpu()
    threads: PositiveInt = 1
    """CPU threads of one peer. Sums may round differently with another number."""
    slots: PositiveInt | None = None
    """Peers that compute at the same time on one host; default: cores / threads, or GPUs * peers_per_gpu."""
    eval_every: PositiveInt = 1
    """Evaluate after every n-th round, and after the last."""
    global_test: bool = False
    """Evaluate on the whole test set too."""
    masked_test: bool | None = None
    """Evaluate on the own test split among the peer's own classes only; default: as the method's paper does."""
    checkpoint_every: PositiveInt = 10
    """Write a checkpoint after every n-th round, and after the last."""
    out: Path = Path("runs")
    """Folder in which run folders are made."""

    _short = field_validator("graph", "algorithm", mode="before")(_named)
    _short_models = field_validator("models", mode="before")(_named)


@dataclass(frozen=True)
class Run:
    """A run file that has been checked, with every named thing resolved."""

    file: RunFile
    hyper: Options
    """The algorithm's hyper-parameters."""
    graph: Graph
    topology: Topology
    source: Source
    """Of the dataset."""
    partition: Partition
    augmentation: Augmentation
    _problem: Callable[[Loc, str], Problem] = field(repr=False, compare=False)

    def blame(self, key: str, error: Exception) -> RunFileError:
        """What went wrong later, as an error of the run file: with the line of ``key`` (dotted)."""
        return RunFileError([self._problem(tuple(key.split(".")), str(error))])

    def blame_options(self, key: str, errors: OptionErrors) -> RunFileError:
        """The same for every problem found in the options at ``key``."""
        return RunFileError([self._problem((*key.split("."), *below), text) for below, text in errors.problems])

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
    def masked_test(self) -> bool:
        """Whether personal accuracy is among the peer's own classes only."""
        return self.algorithm.masked_evaluation if self.file.masked_test is None else self.file.masked_test

    @property
    def algorithm(self) -> type[Algorithm[Any]]:
        return ALGORITHMS[self.file.algorithm.name]

    def resolved(self) -> dict[str, Any]:
        """The run as plain values with every default filled in; loading it gives an equal run."""
        plain = self.file.model_dump(mode="json")
        plain["graph"] = self.graph.resolved(self.file.graph.name, self.topology)
        plain["algorithm"] = {"name": self.file.algorithm.name, **self.hyper.to_dict()}
        data = plain["data"]
        data["dataset"] = {"name": self.file.data.dataset.name, **self.source.to_dict()}
        data["partition"] = {"name": self.file.data.partition.name, **self.partition.to_dict()}
        data["augment"] = {"name": self.file.data.augment.name, **self.augmentation.to_dict()}
        return plain

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.resolved(), sort_keys=False, default_flow_style=None, width=100)

    def digest(self) -> str:
        """SHA-256 over everything that the result follows from; equal on all peers of one run."""
        plain = self.resolved()
        for local in (
            "name",
            "out",
            "transport",
            "chaos",
            "slots",
            "gpu",
            "device",
            "eval_every",
            "checkpoint_every",
        ):
            plain.pop(local)
        plain["data"].pop("root")
        plain["data"].pop("download")
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


HERE = {"P2PFL_HOST": "host", "P2PFL_PORT": "port", "P2PFL_ADDRESS": "address", "P2PFL_KEYS": "keys"}
"""Variables of the environment that say how it is on this host, and the keys of ``transport`` for which they stand.
Besides, P2PFL_ADDRESS_7 is where peer 7 is reached."""


def load(path: Path, sets: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Run:
    """Read, override, validate. Raises RunFileError with all problems.

    Args:
        sets: ``dotted.key=YAML value``.
        environment: variables, of which those in ``HERE`` go before the file, and ``sets`` before them.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RunFileError([Problem(str(path), "", f"cannot be read: {reason}")]) from None
    source = _Source(str(path))
    tree = source.read(text)
    source.adapt(tree, environment or {})
    for assignment in sets:
        source.override(tree, assignment)
    return _check(tree, source, path.parent)


def from_dict(tree: Mapping[str, Any], where: str = "run") -> Run:
    """The same for a run that a program made. ``where`` names it in messages."""
    return _check(dict(tree), _Source(where), Path())


# ---- from YAML to plain values, remembering lines ---------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Plain words mean what they mean in YAML 1.2, of which PyYAML knows the version before.

    1e-4 is a number there, and not text; ``off`` and ``no`` and 2026-01-31 are text. (pydantic still takes
    ``no`` for false where a key is either true or false.)
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in entries if tag.rpartition(":")[2] not in ("float", "bool", "timestamp")]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*([eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*([eE][-+]?\d+)?|\.inf|\.nan)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Source:
    """Where each key came from: a line of the file, or a ``--set`` flag."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[tuple[str, ...], str] = {}

    def read(self, text: str) -> dict[str, Any]:
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            self._walk(node, ())
            value = loader.construct_document(node) if node is not None else None
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise RunFileError([Problem(f"{self.name}:{line}", "", f"not YAML: {error.problem}")]) from None
        except (yaml.YAMLError, ValueError) as error:
            raise RunFileError([Problem(self.name, "", f"not YAML: {' '.join(str(error).split())}")]) from None
        except RecursionError:
            raise RunFileError([Problem(self.name, "", "nested too deeply")]) from None
        if not isinstance(value, dict):
            found = "empty" if value is None else "no mapping of keys to values"
            raise RunFileError([Problem(self.name, "", f"{found}; a run file gives at least {_REQUIRED}")])
        return value

    def _walk(self, node: yaml.Node | None, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if name in seen:
                    text = f"given twice, first in line {seen[name]}"
                    raise RunFileError([Problem(f"{self.name}:{line}", ".".join((*path, name)), text)])
                seen[name] = line
                self.places[(*path, name)] = f"{self.name}:{line}"
                self._walk(value, (*path, name))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.places[(*path, str(index))] = f"{self.name}:{item.start_mark.line + 1}"
                self._walk(item, (*path, str(index)))

    def adapt(self, tree: dict[str, Any], environment: Mapping[str, str]) -> None:
        for name, text in sorted(environment.items()):
            peer = name.removeprefix("P2PFL_ADDRESS_")
            if name in HERE:
                self._put(tree, ("transport", HERE[name]), text, name)
            elif peer != name:
                self._put(tree, ("transport", "hosts", peer), text, name)

    def override(self, tree: dict[str, Any], assignment: str) -> None:
        where = f"--set {assignment}"
        dotted, equals, text = assignment.partition("=")
        path = tuple(dotted.split("."))
        if not equals or not all(path):
            raise RunFileError([Problem(where, "", "not of the form key=value or section.key=value")])
        try:
            value = yaml.load(text, Loader=_Loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise RunFileError([Problem(where, dotted, f"the value is not YAML: {text!r}")]) from None
        self._put(tree, path, value, where)

    def _put(self, tree: dict[str, Any], path: tuple[str, ...], value: Any, where: str) -> None:
        here: dict[str, Any] = tree
        for depth, part in enumerate(path[:-1], start=1):
            below = here.get(part)
            if below is None:
                below = here[part] = {}
            elif isinstance(below, str):
                # `algorithm: mapl` with --set algorithm.lr=... means {name: mapl, lr: ...}
                below = here[part] = {"name": below}
                if place := self.places.pop(path[:depth], None):
                    self.places[*path[:depth], "name"] = place
            if not isinstance(below, dict):
                raise RunFileError([Problem(where, ".".join(path), f"{part} is no section")])
            here = below
        here[path[-1]] = value
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]
        self.places[path] = where

    def problem(self, loc: Loc, message: str) -> Problem:
        """Placed at the key itself, else at the last one below it, else at the nearest enclosing one."""
        path = tuple(map(str, loc))
        below = [known for known in self.places if known[: len(path)] == path]
        above = [path[:length] for length in range(len(path) - 1, 0, -1) if path[:length] in self.places]
        nearest = [path] * (path in self.places) or below[-1:] or above
        where = self.places[nearest[0]] if nearest else self.name
        return Problem(where, ".".join(path), message)

    def in_order(self, problems: Iterable[Problem]) -> list[Problem]:
        """By line, then what has none; without keys that are missing only because they are misspelt."""
        problems = list(problems)
        unknown = [one for one in problems if one.message.startswith("unknown key")]
        meant = {(_section(one.key), one.message.rpartition("did you mean ")[2]) for one in unknown}

        def line(problem: Problem) -> float:
            number = problem.where.removeprefix(f"{self.name}:")
            return int(number) if number.isdecimal() else math.inf

        left = [
            one
            for one in problems
            if one.message != MISSING or (_section(one.key), f"{one.key.rpartition('.')[2]!r}?") not in meant
        ]
        return sorted(left, key=line)


def _section(key: str) -> str:
    return key.rpartition(".")[0]


# ---- from plain values to a Run -----------------------------------------------------------------------------

_Entry = TypeVar("_Entry", bound=Options)

_REQUIRED = ", ".join(name for name, field in RunFile.model_fields.items() if field.is_required())


def _check(tree: dict[str, Any], source: _Source, base: Path) -> Run:
    problems: list[Problem] = []
    file = None
    try:
        file = RunFile.model_validate(tree)
    except ValidationError as error:
        found = explain(error, RunFile.model_fields)
        problems.extend(source.problem(loc, _with_known_keys(loc, text)) for loc, text in found)
    plain = tree if file is None else file.model_dump()

    def resolve(loc: Loc, table: Table[type[_Entry]]) -> _Entry | None:
        """The options at ``loc``; also in a file that is otherwise wrong, so that all problems are reported."""
        value: Any = plain
        for part in loc:
            value = value.get(part) if isinstance(value, dict) else None
        try:
            named = Named.model_validate(_named(value))
        except ValueError:  # reported above
            return None
        try:
            return table.find(named.name).parse(named.given)
        except OptionErrors as errors:
            problems.extend(source.problem(loc + below, text) for below, text in errors.problems)
            return None

    hypers = Table("algorithm", {name: method.Hyper for name, method in ALGORITHMS.items()})
    hyper = resolve(("algorithm",), hypers)
    graph = resolve(("graph",), GRAPHS)
    dataset = resolve(("data", "dataset"), DATASETS)
    partition = resolve(("data", "partition"), PARTITIONS)
    augmentation = resolve(("data", "augment"), AUGMENTATIONS)
    if file is None:
        raise RunFileError(source.in_order(problems))

    problems.extend(source.problem(loc, text) for loc, text in _odd_times(file))
    if file.models.name not in MODELS:
        problems.append(source.problem(("models", "name"), unknown_model(file.models.name)))
    elif hyper is not None:
        unfit = _unfit_models(file, ALGORITHMS[file.algorithm.name])
        problems.extend(source.problem(loc, text) for loc, text in unfit)
    problems.extend(source.problem(("transport", key), text) for key, text in _unsafe(file))
    where = file.transport
    wrong = addresses.problems(file.peers, where.port, where.address, where.hosts)
    problems.extend(source.problem(("transport", *keys), text) for keys, text in wrong)
    topology = None
    if graph is not None:
        try:
            topology = graph.build(file.peers, file.seed, base)
        except P2pflError as error:
            problems.append(source.problem(("graph",), str(error)))
    if problems:
        raise RunFileError(source.in_order(problems))
    parts = (hyper, graph, topology, dataset, partition, augmentation)
    assert all(part is not None for part in parts)  # else there were problems
    return Run(file, *parts, source.problem)  # type: ignore[arg-type]


def _odd_times(file: RunFile) -> list[tuple[Loc, str]]:
    """Peers and rounds that are named and are not there."""
    found: list[tuple[Loc, str]] = []

    def check(loc: Loc, *, peer: PeerId | None = None, t: int | None = None) -> None:
        if peer is not None and peer >= file.peers:
            found.append((loc, f"no peer {peer}; the {file.peers} peers are 0 to {file.peers - 1}"))
        if t is not None and t >= file.rounds:
            found.append((loc, f"round {t} never comes: rounds are 0 to {file.rounds - 1}"))

    for peer, joins in file.joins_at.items():
        check(("joins_at", peer), peer=peer, t=joins)
    if set(file.joins_at) >= set(range(file.peers)):
        found.append((("joins_at",), "nobody is there in round 0: leave out those who are there from the first"))
    chaos = file.chaos
    for what, strikes in (("kill", chaos.kill), ("pause", chaos.pause)):
        for number, strike in enumerate(strikes):
            check(("chaos", what, number, "peer"), peer=strike.peer)
            check(("chaos", what, number, "round"), t=strike.round)
    for number, slow in enumerate(chaos.straggler):
        check(("chaos", "straggler", number, "peer"), peer=slow.peer)
    for number, partition in enumerate(chaos.partition):
        loc = ("chaos", "partition", number)
        check((*loc, "round"), t=partition.round)
        peers = [peer for group in partition.groups for peer in group]
        for peer in peers:
            check((*loc, "groups"), peer=peer)
        if len(set(peers)) < len(peers):
            found.append(((*loc, "groups"), "a peer can be in one group only"))
        if (partition.rounds is None) == (partition.seconds is None):
            found.append((loc, "give rounds or seconds, and not both"))
    return found


def _unsafe(file: RunFile) -> list[tuple[str, str]]:
    """What stands in the way of safe connections: a key of ``transport``, and what to do."""
    transport, found = file.transport, []
    if transport.keys is None and transport.public_keys is not None:
        found.append(("public_keys", "nothing without transport.keys, the folder with the private keys"))
    elif transport.public_keys is not None and (problem := keys.problem_with(transport.public_keys, file.peers)):
        found.append(("public_keys", problem))
    if transport.keys is not None and transport.insecure:
        found.append(("insecure", "there are transport.keys too: leave out one of them"))
    if transport.keys is None and not transport.insecure and not keys.is_loopback(transport.host):
        text = (
            f"{transport.host!r} is heard beyond this host: make keys with `p2pfl keys new {file.peers}` and give "
            "transport.keys their folder; or do without, with transport.insecure: true"
        )
        found.append(("host", text))
    return found


def _unfit_models(file: RunFile, method: type[Algorithm[Any]]) -> list[tuple[Loc, str]]:
    """What the method asks of the peers' models and they do not have."""
    name = file.models.name
    kinds = sorted({architecture(name, peer) for peer in range(file.peers)})
    found: list[tuple[Loc, str]] = []
    if method.homogeneous and len(kinds) > 1:
        text = (
            f"{file.algorithm.name} mixes whole models, so all peers need one architecture; "
            f"{name!r} has {', '.join(kinds)}: name one of these instead"
        )
        found.append((("models", "name"), text))
    layered = [kind for kind in kinds if not has_linear_head(kind)]
    if method.linear_heads and layered:
        text = (
            f"{file.algorithm.name} compares or mixes the weights of linear heads; those of {', '.join(layered)} "
            "have several layers: name models without '+'"
        )
        found.append((("models", "name"), text))
    if method.equal_features and len(kinds) > 1 and (file.models.features or MODELS[name].features) is None:
        text = (
            f"{file.algorithm.name} exchanges what depends on the number of features, and those of {name!r} "
            "each have their own: give all the same, e.g. 512"
        )
        found.append((("models", "features"), text))
    return found


def _with_known_keys(loc: Loc, text: str) -> str:
    """``explain`` knows the keys of the top level; here are those of the sections below."""
    if text != "unknown key":
        return text
    section: Any = RunFile
    for part in loc[:-1]:
        if isinstance(part, str):
            section = section.model_fields[part].annotation
        else:  # an entry of a list
            section, *_ = get_args(section)
    return unknown_key(loc[-1], section.model_fields)
