"""The keys ``aggregation``, ``gradient`` and ``clip_norm``: their forms, and what methods refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pfl.aggregation import Mean, RuleList
from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import RunFileError
from p2pfl.learning.gradients import GradientRule
from p2pfl.run_file.checks import combines
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run

RULES = '''\
from p2pfl import plugins
from p2pfl.aggregation import PerTensor, Rule
from p2pfl.learning.gradients import GradientRule


@plugins.aggregation("first")
class First(PerTensor):
    """What the lowest sender has."""

    weighted = False

    def combine_tensor(self, tensors, given):
        return tensors[0]


@plugins.aggregation("all")
class All(Rule):
    """All of them."""


@plugins.gradient("plain")
class Plain(GradientRule):
    """As it is."""
'''

RUN = """\
name: rules
peers: 3
rounds: 2
plugins: [rules.py]
data: {dataset: digits, partition: {name: iid, validation: 0.2}}
models: tiny-cnn
algorithm: {name: fedavg}
"""

LEARN_WEIGHTS = ["l2c", "meta-l2c", "fedfomo", "pfedsim", "mapl", "mapl+"]


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "rules.yaml").write_text(RUN)

    def make(*sets: str) -> Run:
        return load(tmp_path / "rules.yaml", sets)

    return make


def refused(loaded: Any, *sets: str) -> list[tuple[str, str]]:
    with pytest.raises(RunFileError) as caught:
        loaded(*sets)
    return [(problem.key, problem.message) for problem in caught.value.problems]


def test_defaults_are_the_means(loaded: Any) -> None:
    run = loaded()
    assert (type(run.aggregation), type(run.gradient)) == (Mean, GradientRule)
    assert run.resolved()["aggregation"] == run.resolved()["gradient"] == {"name": "mean"}
    assert run.hyper.clip_norm is None


def test_a_list_of_rules_is_resolved_and_part_of_the_runs_identity(loaded: Any) -> None:
    run = loaded("aggregation=[all, {name: first}]")
    assert isinstance(run.aggregation, RuleList)
    rules = {"name": "list", "rules": [{"name": "all"}, {"name": "first"}]}
    assert run.resolved()["aggregation"] == rules
    assert [plugin.name for plugin in run.plugins] == ["rules"]
    hashes = {loaded(*sets).config_hash() for sets in (["aggregation=first"], ["gradient=plain"], [], ["rounds=2"])}
    assert len(hashes | {run.config_hash()}) == 4


@pytest.mark.parametrize(
    ("sets", "key", "text"),
    [
        (["aggregation=maen"], "aggregation.name", "did you mean 'mean'?"),
        (["aggregation=[all, maen]"], "aggregation.rules.1", "did you mean 'mean'?"),
        (["aggregation=[first, all]"], "aggregation", "'first' replaces the mean, so it must be the last rule"),
        (["aggregation=3"], "aggregation", "should be a name"),
        (["aggregation={name: all, f: 1}"], "aggregation.f", "unknown key 'f'"),
        (["gradient=plane"], "gradient.name", "did you mean 'plain'?"),
        (["algorithm.clip_norm=0"], "algorithm.clip_norm", "greater than 0"),
        (["algorithm.name=cga", "algorithm.clip_norm=1"], "algorithm.clip_norm", "has no effect: cga"),
        (["algorithm.name=cga", "gradient=plain"], "gradient", "'plain' has no effect: cga"),
    ],
)
def test_problems_are_named_at_their_keys(loaded: Any, sets: list[str], key: str, text: str) -> None:
    ((found, message),) = refused(loaded, *sets)
    assert found == key
    assert text in message


def test_methods_that_average_nothing_refuse_rules() -> None:
    assert {name for name, method in ALGORITHMS.items() if not combines(method)} == {"local", "dfml", "def-kt"}


@pytest.mark.parametrize("name", ["local", "def-kt"])
def test_a_rule_without_effect_is_refused(loaded: Any, name: str) -> None:
    ((key, message),) = refused(loaded, f"algorithm.name={name}", "aggregation=all")
    assert key == "aggregation"
    assert message.startswith(f"'all' has no effect: {name} does not average what peers send")
    loaded(f"algorithm.name={name}", "aggregation=mean")


@pytest.mark.parametrize("name", [*LEARN_WEIGHTS, "sgp"])
def test_methods_that_compute_weights_refuse_rules_that_ignore_them(loaded: Any, name: str) -> None:
    ((key, message),) = refused(loaded, f"algorithm.name={name}", "aggregation=[all, first]")
    assert key == "aggregation"
    assert message.startswith(f"'first' ignores weights, but {name} computes")
    loaded(f"algorithm.name={name}", "aggregation=all")


@pytest.mark.parametrize("name", ["fedproto", "lg-fedavg", "fedavg-ssl", "heterofl"])
def test_methods_without_whole_models_or_labels_refuse_rules_that_measure_them(loaded: Any, name: str) -> None:
    problems = refused(loaded, f"algorithm.name={name}", "aggregation=[norm-clip, ubar]")
    assert [message for _, message in problems if message.startswith("'ubar' measures the loss")]
    loaded("algorithm.name=ditto", "aggregation=ubar")


# ---- f, and the peers' degrees ---------------------------------------------------------------------------------

PATH = ["peers=5", "graph=line"]


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (
            [*PATH, "aggregation={name: trimmed-mean, f: 1}"],
            "peer 0 has 1 neighbor (2 peers have this problem): 'trimmed-mean' tolerates 0 attackers among 2 "
            "contributions, not f = 1; set f to auto or to 0 at most, or give the peer 2 neighbors",
        ),
        (
            ["peers=4", "aggregation=[norm-clip, {name: krum, f: 1}]"],
            "peer 0 has 3 neighbors (4 peers have this problem): 'krum' tolerates 0 attackers among 4",
        ),
        (
            ["peers=17", "aggregation={name: mda, f: 6}"],
            "'mda' looks at C(17, 6) = 12,376 subsets of 17 contributions, 6 attackers among them; 10,000 is the",
        ),
        (["peers=21", "aggregation=smea"], "C(21, 6) = 54,264"),
        (
            ["peers=8", "graph=one-peer-exponential", "aggregation={name: monna, f: 1}"],
            "peer 0 has 1 neighbor at most (8 peers have",
        ),
    ],
)
def test_what_a_peers_degree_cannot_bear_is_refused(loaded: Any, sets: list[str], text: str) -> None:
    ((key, message),) = refused(loaded, "data.partition=iid", *sets)
    assert key == "aggregation"
    assert text in message


@pytest.mark.parametrize(
    "sets",
    [
        [*PATH, "aggregation=trimmed-mean"],  # auto
        ["peers=5", "aggregation={name: krum, f: 1}"],
        ["peers=14", "aggregation={name: mda, f: 6}"],
        [
            "peers=4",
            "graph={name: edges, edges: [[0, 1], [1, 2], [0, 2]], allow_disconnected: true}",
            "aggregation={name: monna, f: 1}",
        ],
        ["peers=8", "graph=one-peer-exponential", "aggregation=monna"],
    ],
)
def test_what_each_peers_degree_bears_is_accepted(loaded: Any, sets: list[str]) -> None:
    loaded(*sets)


@pytest.mark.parametrize("wrong", ["-1", "some", "1.5"])
def test_f_is_a_number_or_auto(loaded: Any, wrong: str) -> None:
    problems = refused(loaded, f"aggregation={{name: krum, f: {wrong}}}")
    assert [key for key, _ in problems] == ["aggregation.f"]


# ---- auto -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpsgd", "fedavg", "fedproto", "lg-fedavg", "heterofl", *LEARN_WEIGHTS])
def test_auto_is_resolved_to_the_rule_recommended_for_the_method(loaded: Any, name: str) -> None:
    run = loaded(f"algorithm.name={name}", "peers=5", "aggregation=auto")
    recommended = "norm-clip" if name in LEARN_WEIGHTS else "monna"
    assert (run.recommended, run.rules) == (True, (recommended,))
    named = loaded(f"algorithm.name={name}", "peers=5", f"aggregation={recommended}")
    assert run.resolved() == named.resolved()
    assert run.config_hash() == named.config_hash()
    assert not named.recommended


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("local", "'auto' has no effect: local does not average what peers send"),
        ("dfml", "'auto' has no effect: dfml does not average what peers send"),
        (
            "gossip",
            "'auto' stands for no rule with gossip, whose rounds do not combine one contribution of each neighbor",
        ),
        ("sgp", "'auto' stands for no rule with sgp, whose rounds do not combine one contribution of each neighbor"),
    ],
)
def test_auto_is_refused_where_no_rule_is_recommended(loaded: Any, name: str, text: str) -> None:
    ((key, message),) = refused(loaded, f"algorithm.name={name}", "aggregation=auto", "data.partition=iid")
    assert key == "aggregation"
    assert message.startswith(text)


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (
            ["peers=5", "graph=ring"],
            "peer 0 has 2 neighbors (5 peers have this problem): 'monna' is what auto stands for here, and "
            "withstands no attacker among 3 contributions; give the peer 3 neighbors, or name a rule",
        ),
        (
            ["peers=5", "graph=star", "algorithm.name=mapl"],
            "peer 1 has 1 neighbor (4 peers have this problem): 'norm-clip' is what auto stands for here",
        ),
        (["peers=8", "graph=one-peer-exponential"], "peer 0 has 1 neighbor at most (8 peers have this problem)"),
    ],
)
def test_auto_is_refused_where_a_peer_has_too_few_neighbors_for_any_attacker(
    loaded: Any, sets: list[str], text: str
) -> None:
    ((key, message),) = refused(loaded, "aggregation=auto", *sets)
    assert key == "aggregation"
    assert message.startswith(text)


@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        ("{name: auto, f: 2}", "aggregation.f", "unknown key 'f'"),
        ("[norm-clip, auto]", "aggregation", "'auto' stands alone; name the rules of a list"),
    ],
)
def test_auto_takes_no_parameters_and_stands_alone(loaded: Any, section: str, key: str, text: str) -> None:
    ((found, message),) = refused(loaded, f"aggregation={section}")
    assert found == key
    assert text in message
