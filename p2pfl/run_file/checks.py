"""Cross-checks of a run file: problems that involve more than one key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from types import CodeType, FunctionType
from typing import Any

from p2pfl import PeerId, public_keys
from p2pfl.adversaries.base import Adversary, Poisoning
from p2pfl.aggregation import Auto, Mean, Rule, RuleList
from p2pfl.algorithms.base import Algorithm
from p2pfl.graphs import Graph, Schedule, TimeVaryingGraph
from p2pfl.learning.gradients import GradientRule
from p2pfl.learning.metrics import METRICS
from p2pfl.learning.named_losses import DEFAULT, LOSSES
from p2pfl.learning.trainer import Trainer
from p2pfl.messaging.topology import Topology
from p2pfl.models import MODELS, architecture, has_linear_head, unknown_model
from p2pfl.models.import_path import parse
from p2pfl.options import Loc, OptionProblem, Options, unknown
from p2pfl.run_file import addresses
from p2pfl.run_file.addresses import is_loopback
from p2pfl.run_file.schema import RunFile
from p2pfl.run_file.time import TimeError


def cross_checks(file: RunFile, method: type[Algorithm[Any]] | None) -> Iterator[OptionProblem]:
    """Every problem found. ``method`` is None if the algorithm section has problems of its own."""
    yield from _check_peers_and_rounds(file)
    unknown_models = [(number, text) for number, text in enumerate(file.models.texts) if text not in MODELS]
    for number, text in unknown_models:
        loc = tuple(file.models.key.split("."))
        yield OptionProblem((*loc, number) if file.models.members else loc, unknown_model(text))
    if not unknown_models and method is not None:
        yield from _check_models(file, method)
    for number, metric in enumerate(file.metrics):
        if metric not in METRICS:
            yield OptionProblem(("metrics", number), unknown(metric, METRICS))
    yield from _check_security(file)
    transport = file.transport
    for key, text in addresses.problems(file.peers, transport.port, transport.address, transport.hosts):
        yield OptionProblem(("transport", *key), text)
    if file.time is not None:
        try:
            file.time.check(file.peers, file.seed)
        except TimeError as error:
            yield OptionProblem(("time", *error.key), str(error))
        if not file.time.train and method is not None and method.sends_training:
            text = "sends what its training computes; remove this key, or choose another algorithm"
            yield OptionProblem(("time", "train"), f"{file.algorithm.name} {text}")


def has_loss_of_its_own(method: type[Algorithm[Any]]) -> bool:
    """Return whether a method ignores the loss that the run file names."""
    return not (method.named_loss or method.loss is Trainer.loss)


def check_loss(name: str, method: type[Algorithm[Any]], hyper: Options) -> Iterator[OptionProblem]:
    """A method that does not train with the loss of the run file must not be given one."""
    loss = getattr(hyper, "loss", DEFAULT)
    if loss != DEFAULT and loss in LOSSES and has_loss_of_its_own(method):
        text = f"{loss!r} has no effect: {name} has its own loss; remove it, or choose another algorithm"
        yield OptionProblem(("algorithm", "loss"), text)


def combines(method: type[Algorithm[Any]]) -> bool:
    """Return whether a method uses the run's aggregation rule: its code names it."""
    return bool(_named_by(method) & {"aggregation"})


def exchanges(method: type[Algorithm[Any]]) -> bool:
    """Return whether all peers send at the same point of a round: the code of the method names such a verb."""
    return bool(_named_by(method) & {"exchange", "exchange_including_own", "publish"})


def gathers(method: type[Algorithm[Any]]) -> bool:
    """Return whether a round combines what all neighbors send: the code of the method names such a verb."""
    return combines(method) and bool(_named_by(method) & {"exchange", "exchange_including_own", "gather"})


def _named_by(method: type[Algorithm[Any]]) -> set[str]:
    """Return the global names and the attributes in the code of a method, and of its base classes."""

    def names(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from names(constant)

    bases = method.__mro__[: method.__mro__.index(Algorithm)]
    functions = (value for base in bases for value in vars(base).values() if isinstance(value, FunctionType))
    return {name for function in functions for name in names(function.__code__)}


def _members(file: RunFile, rule: Rule | None) -> list[tuple[str, Rule]]:
    """Return the rules of a run and their names, without the mean."""
    if rule is None or type(rule) is Mean:
        return []
    return rule.members if isinstance(rule, RuleList) else [(file.aggregation.name, rule)]


def _screening(file: RunFile, rule: Rule | None) -> str | None:
    """Return the name of the rule that screens models before they are sent, if any."""
    return next((name for name, each in _members(file, rule) if each.screening is not None), None)


def check_rules(
    file: RunFile, method: type[Algorithm[Any]], hyper: Options, rule: Rule | None, gradient: GradientRule | None
) -> Iterator[OptionProblem]:
    """Rules must have an effect, and not ignore the weights that a method computes."""
    name, members = file.algorithm.name, _members(file, rule)
    unweighted = [member for member, each in members if not each.weighted]
    measured = [member for member, each in members if each.needs_loss]
    if members and not combines(method):
        listed = ", ".join(member for member, _ in members)
        text = (
            f"{listed!r} has no effect: {name} does not average what peers send (it never uses self.aggregation); "
            "remove it, or choose another algorithm"
        )
        yield OptionProblem(("aggregation",), text)
    elif isinstance(rule, Auto):
        text = (
            f"'auto' stands for no rule with {name}, whose rounds do not combine one contribution of each neighbor: "
            "no rule was measured there; name a rule, or choose another algorithm"
        )
        yield OptionProblem(("aggregation",), text)
    elif unweighted and method.learns_weights:
        text = (
            f"{unweighted[0]!r} ignores weights, but {name} computes the weights of what it averages; choose a rule "
            "that uses them, e.g. mean"
        )
        yield OptionProblem(("aggregation",), text)
    elif measured and (has_loss_of_its_own(method) or not method.homogeneous or method.sends_parts):
        text = (
            f"{measured[0]!r} measures the loss of received models on local samples, but {name} sends no whole "
            "models, or has a loss of its own; choose another rule, e.g. monna"
        )
        yield OptionProblem(("aggregation",), text)
    elif (screening := _screening(file, rule)) and method.screened is None:
        text = (
            f"{screening!r} screens models before they are sent, but peers of {name} do not all send models at the "
            "same point of a round, or use them for more than averages; choose another rule, e.g. balance"
        )
        yield OptionProblem(("aggregation",), text)
    if method.own_gradients:
        text = f"has no effect: {name} makes its gradients itself; remove it, or choose another algorithm"
        if getattr(hyper, "clip_norm", None) is not None:
            yield OptionProblem(("algorithm", "clip_norm"), text)
        if gradient is not None and type(gradient) is not GradientRule:
            yield OptionProblem(("gradient",), f"{file.gradient.name!r} {text}")


def check_attacks(
    file: RunFile, method: type[Algorithm[Any]] | None, rule: Rule | None, attacks: Sequence[Adversary | None]
) -> Iterator[OptionProblem]:
    """Attacks must have an effect; rushing ones need a point of the round where all peers send."""
    for number, (entry, attack) in enumerate(zip(file.adversaries, attacks, strict=True)):
        if isinstance(attack, Poisoning):  # whatever the round and the message
            for key, given in (("from", entry.first), ("messages", entry.messages)):
                if given:
                    text = f"has no effect: {entry.name!r} poisons training data when they are loaded; remove it"
                    yield OptionProblem(("adversaries", number, key), text)
        if attack is not None and attack.uses_rule and rule is not None and rule.needs_loss:
            text = (
                f"{entry.name!r} cannot be tuned against {file.aggregation.name}, which measures models on the "
                "receivers' data; remove tune: true"
            )
            yield OptionProblem(("adversaries", number), text)
        if attack is not None and attack.rushing and (screening := _screening(file, rule)):
            text = (
                f"{entry.name!r} uses what honest neighbors send at the same point of a round, but with "
                f"{screening} a peer sends a sketch of its model before it sees one, and a model that "
                "does not fit is dropped; choose an attack on a peer's own messages, e.g. sign-flip"
            )
            yield OptionProblem(("adversaries", number, "name"), text)
        elif attack is not None and attack.rushing and method is not None and not exchanges(method):
            text = (
                f"{entry.name!r} uses what honest neighbors send at the same point of a round, but peers of "
                f"{file.algorithm.name} send to some, in turn, or nothing; choose an attack on a peer's own "
                "messages, e.g. sign-flip"
            )
            yield OptionProblem(("adversaries", number, "name"), text)


def check_synchrony(
    file: RunFile,
    method: type[Algorithm[Any]],
    hyper: Options,
    rule: Rule | None,
    attacks: Sequence[Adversary | None],
) -> Iterator[OptionProblem]:
    """Rounds that do not wait for one another need a method, rule and attacks that can use messages of any round."""
    aged = [member for member, each in _members(file, rule) if each.needs_ages]
    if aged and not file.synchrony.bound:
        text = (
            f"{aged[0]!r} has no effect: it goes by the ages of messages, which are 0 where rounds wait for one "
            "another; set synchrony, e.g. none or {staleness: 4}, or remove the rule"
        )
        yield OptionProblem(("aggregation",), text)
    if file.synchrony.bound is None:
        return
    name, loc = file.algorithm.name, ("synchrony",)
    if not method.asynchronous:
        text = (
            f"{name} needs messages of the same round; remove synchrony, or choose a method whose peers only send "
            "what they have learned, such as dpsgd, fedavg, fedproto or mapl"
        )
        yield OptionProblem(loc, text)
    for key, without in (("participation", 1.0), ("message_budget", None)):
        if method.asynchronous and (value := getattr(hyper, key, without)) != without:
            text = f"conflicts with {key}: {value:g} of {name}, for which all peers must compute the same round"
            yield OptionProblem(loc, f"{text}; remove one of the two")
    if rule is not None and rule.screening is not None:
        text = f"{file.aggregation.name!r} has peers answer each other in a round; remove it, or remove synchrony"
        yield OptionProblem(("aggregation",), text)
    for number, (entry, attack) in enumerate(zip(file.adversaries, attacks, strict=True)):
        if attack is not None and attack.rushing:
            text = (
                f"{entry.name!r} uses what honest neighbors send in the same round, but rounds do not wait for one "
                "another (synchrony); choose an attack on a peer's own messages, e.g. sign-flip"
            )
            yield OptionProblem(("adversaries", number, "name"), text)


def _check_peers_and_rounds(file: RunFile) -> Iterator[OptionProblem]:
    """Late joiners and faults must name existing peers and rounds."""

    def check(loc: Loc, *, peer: PeerId | None = None, t: int | None = None) -> Iterator[OptionProblem]:
        if peer is not None and peer >= file.peers:
            yield OptionProblem(loc, f"no peer {peer}; the {file.peers} peers are 0 to {file.peers - 1}")
        if t is not None and t >= file.rounds:
            yield OptionProblem(loc, f"no round {t}; the {file.rounds} rounds are 0 to {file.rounds - 1}")

    for peer, joins in file.joins_at.items():
        yield from check(("joins_at", peer), peer=peer, t=joins)
    if set(file.joins_at) >= set(range(file.peers)):
        yield OptionProblem(
            ("joins_at",), "at least one peer must start in round 0; list only late joiners in joins_at"
        )
    chaos = file.chaos
    for kind, strikes in (("kill", chaos.kill), ("pause", chaos.pause)):
        for number, strike in enumerate(strikes):
            yield from check(("chaos", kind, number, "peer"), peer=strike.peer)
            yield from check(("chaos", kind, number, "round"), t=strike.round)
    for number, attack in enumerate(file.adversaries):
        for peer in attack.peers if isinstance(attack.peers, tuple) else ():
            yield from check(("adversaries", number, "peers"), peer=peer)
        yield from check(("adversaries", number, "from"), t=attack.first)
    for number, straggler in enumerate(chaos.straggler):
        yield from check(("chaos", "straggler", number, "peer"), peer=straggler.peer)
    for number, partition in enumerate(chaos.partition):
        loc = ("chaos", "partition", number)
        yield from check((*loc, "round"), t=partition.round)
        peers = [peer for group in partition.groups for peer in group]
        for peer in peers:
            yield from check((*loc, "groups"), peer=peer)
        if len(set(peers)) < len(peers):
            yield OptionProblem((*loc, "groups"), "a peer can be in one group only")
        if (partition.rounds is None) == (partition.seconds is None):
            yield OptionProblem(loc, "set either rounds or seconds, not both")


def _check_security(file: RunFile) -> Iterator[OptionProblem]:
    transport = file.transport
    if transport.keys is None and transport.public_keys is not None:
        yield OptionProblem(
            ("transport", "public_keys"), "needs transport.keys too, the folder with the private keys"
        )
    elif transport.public_keys is not None and (text := public_keys.problem_with(transport.public_keys, file.peers)):
        yield OptionProblem(("transport", "public_keys"), text)
    if transport.keys is not None and transport.insecure:
        yield OptionProblem(("transport", "insecure"), "conflicts with transport.keys; remove one of the two")
    if transport.keys is None and not transport.insecure and not is_loopback(transport.host):
        text = (
            f"{transport.host!r} is reachable from other hosts: create keys with `p2pfl keys new {file.peers}` and "
            "set transport.keys to their folder, or allow unencrypted connections with transport.insecure: true"
        )
        yield OptionProblem(("transport", "host"), text)


def check_graph(
    file: RunFile, method: type[Algorithm[Any]], graph: Graph, rule: Rule | None
) -> Iterator[OptionProblem]:
    """The graph must meet the requirements of the method, and of a rule that exchanges further messages."""
    if not isinstance(graph, TimeVaryingGraph):
        return
    name = file.graph.name
    if method.prunes:
        text = (
            f"{file.algorithm.name} learns which neighbors to keep for good, so the graph must stay the same, but "
            f"{name!r} changes; choose another graph, or a method such as dpsgd"
        )
        yield OptionProblem(("graph",), text)
    elif graph.directed and (replying := file.algorithm.name if method.replies else _screening(file, rule)):
        instead = "a method such as dpsgd" if method.replies else "a rule such as balance"
        text = (
            f"{replying} has peers answer each other, so edges need both directions, but the edges of {name!r} have "
            f"one; choose an undirected graph, or {instead}"
        )
        yield OptionProblem(("graph",), text)


def check_sides(file: RunFile, method: type[Algorithm[Any]], topology: Topology) -> Iterator[OptionProblem]:
    """The graph must be bipartite over all rounds if the method asks for it."""
    if method.bipartite and (within := [(i, j) for i, j in topology.edges if topology.sides[i] == topology.sides[j]]):
        i, j = within[0]
        text = (
            f"{file.algorithm.name} needs two sides with all edges between them, but the edges of "
            f"{file.graph.name!r}, over all rounds, form a cycle of odd length through peers {i} and {j}; choose a "
            "bipartite graph, such as a ring or torus of even lengths, a line, or a star"
        )
        yield OptionProblem(("graph",), text)


def check_degrees(
    file: RunFile, rule: Rule, topology: Topology, schedule: Schedule | None, *, recommended: bool
) -> Iterator[OptionProblem]:
    """Each peer must get enough contributions in some round, and never too many, for its rule's parameters.

    A ``recommended`` rule must also withstand an attacker among them.
    """

    def refusal(n: int) -> str | None:
        text = rule.refusal(n)
        if text is not None or not recommended or rule.withstands(n) > 0:
            return text
        least = next(more for more in count(n) if rule.withstands(more) > 0)
        return (
            f"is what auto stands for here, and withstands no attacker among {n} contributions; give the peer "
            f"{least - 1} neighbors, or name a rule"
        )

    most = [len(sources) for sources in topology.sources]
    if not any(refusal(1 + n) for n in range(1, 1 + max(most))):
        return
    if schedule is not None:
        period = min(schedule.period or file.rounds, file.rounds)
        most = [max(map(len, each)) for each in zip(*(schedule(t).sources for t in range(period)), strict=True)]
    refusals = {peer: refusal(1 + n) for peer, n in enumerate(most) if n > 0}  # without neighbors: nothing to do
    refused = {peer: text for peer, text in refusals.items() if text is not None}
    if refused:
        peer, text = next(iter(refused.items()))
        subject = "" if isinstance(rule, RuleList) else f"{file.aggregation.name!r} "
        neighbors = f"{most[peer]} neighbor{'' if most[peer] == 1 else 's'}{'' if schedule is None else ' at most'}"
        others = f" ({len(refused)} peers have this problem)" if len(refused) > 1 else ""
        text = f"peer {peer} has {neighbors}{others}: {subject}{text}"
        yield OptionProblem(("aggregation",), text)


def _check_models(file: RunFile, method: type[Algorithm[Any]]) -> Iterator[OptionProblem]:
    """The models must meet the method's requirements."""
    name, group = file.models.title, file.models.group
    architectures = sorted({architecture(group, peer) for peer in range(file.peers)})
    loc = tuple(file.models.key.split("."))
    if method.homogeneous and len(architectures) > 1:
        text = (
            f"{file.algorithm.name} averages or replaces whole models, so all peers need the same architecture, but "
            f"{name!r} has {', '.join(architectures)}; choose one of these"
        )
        yield OptionProblem(loc, text)
    layered = [model for model in architectures if not has_linear_head(model)]
    if method.linear_heads and layered:
        text = (
            f"{file.algorithm.name} compares or averages the weights of linear heads, but the heads of "
            f"{', '.join(layered)} have several layers; choose models without '+'"
        )
        yield OptionProblem(loc, text)
    imported = [model for model in architectures if parse(model) is not None]  # built and checked with the data
    equal = not method.equal_features or len(architectures) == 1
    if not (equal or imported or file.models.features or group.features):
        text = (
            f"{file.algorithm.name} needs the same number of features on all peers, but the backbones of {name!r} "
            "differ in it; set one for all, e.g. 512"
        )
        yield OptionProblem(("models", "features"), text)
