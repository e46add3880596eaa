"""The figures that claims are about, by the names that the files in ``papers`` have for them.

A *difference* is of two runs, the first minus the second; its function is of one run. A *figure*'s function is of all
runs of a claim, by label, of one seed. Rounds count from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from statistics import fmean, pstdev

import numpy as np

from benchmarks.claims.summary import Summary

Runs = Mapping[str, Summary]
MAXIMA = (5, 15, 30, 50, 75, 105)
"""Rounds in which DFML's α is α_max: the ends of periods of 5, 10, … and 30 rounds."""
TRAINED = 30.0
"""Accuracy above which a peer of Ditto has trained; chance reaches 17 % with two classes, trained peers 49 %."""


def compared(run: Summary) -> str:
    """Name the curve by which a paper compares.

    DFML compares peak models. Released codes that average heads evaluate the peers' own heads before they do.
    """
    return next(name for name in ("peak", "own_head", "accuracy") if name in run.curves)


# ---- of one run ----------------------------------------------------------------------------------------------


def final(run: Summary) -> float:
    """Accuracy after the last round, of peak models where the method has them."""
    return run.last(compared(run))


def last(run: Summary) -> float:
    """Accuracy after the last round, of the regular models."""
    return run.last()


def last_generalization(run: Summary) -> float:
    """Accuracy on all styles after the last round."""
    return run.last("generalization")


def local(run: Summary) -> float:
    """Local accuracy after the last round: on the peer's validation samples."""
    return run.last("peak_local" if "peak_local" in run.curves else "local")


def settled(run: Summary) -> float:
    """Mean accuracy in the last quarter of the rounds."""
    return run.settled(compared(run))


def settled_masked(run: Summary) -> float:
    """``settled``, with the scores of the peer's classes alone."""
    return run.settled("masked")


def settled_worst(run: Summary) -> float:
    """``settled``, of the worst tenth of the peers."""
    return run.settled("worst")


def best(run: Summary) -> float:
    """Accuracy of the best evaluated round, over the samples of all peers."""
    return run.highest("pooled")


def mean(run: Summary) -> float:
    """Mean accuracy of all evaluated rounds: how fast a run learns."""
    return run.mean(compared(run))


def area(run: Summary) -> float:
    """Mean accuracy in rounds 10, 20, … and 100: how fast a run learns."""
    return _area(run, compared(run))


def area_regular(run: Summary) -> float:
    """``area``, of the regular models: the mean age of the peak models is 18 of 105 rounds."""
    return _area(run, "accuracy")


def _area(run: Summary, curve: str) -> float:
    return fmean(run.at(t, curve) for t in range(10, 101, 10))


def worst_fifth(run: Summary) -> float:
    """Mean accuracy of the worst fifth of the peers after the last round."""
    return fmean(sorted(run.accuracies)[: len(run.accuracies) // 5])


def deviation(run: Summary) -> float:
    """Standard deviation of the peers' accuracies after the last round."""
    return pstdev(run.accuracies)


def head_gap(run: Summary) -> float:
    """Similarity of heads inside clusters minus across."""
    return run.probe["inside"] - run.probe["across"]


# ---- of all runs ---------------------------------------------------------------------------------------------


def only(runs: Runs) -> Summary:
    (run,) = runs.values()
    return run


def spread(runs: Runs) -> float:
    """How far the last accuracies are apart, by chance too."""
    return _spread(list(runs.values()))


def _spread(runs: list[Summary]) -> float:
    accuracies = [run.last() for run in runs]
    return max(accuracies) - min(accuracies)


# MAPL


def above_heads(runs: Runs) -> float:
    """MAPL's accuracy minus the accuracy of FedProto's heads."""
    return runs["mapl"].settled() - runs["fedproto"].settled("head")


def above_masked(runs: Runs) -> float:
    """MAPL's accuracy minus FedProto's with the scores of the peer's classes alone."""
    return runs["mapl"].settled() - runs["fedproto"].settled("masked")


def margin_grows(runs: Runs) -> float:
    """MAPL's lead over FedClassAvg with 16 peers minus the lead with 8."""
    more = settled(runs["mapl, 16"]) - settled(runs["fedclassavg, 16"])
    return more - (settled(runs["mapl"]) - settled(runs["fedclassavg"]))


def blocks(runs: Runs) -> float:
    """Weight of another cluster's peer in percent of the weight of a peer of the same cluster."""
    return 100.0 * only(runs).last("across") / only(runs).last("inside")


def uneven(runs: Runs) -> float:
    """Largest minus smallest weight of the other peers of a cluster, in percent of their mean; mean over peers."""
    run = only(runs)
    found = []
    for i, weights in enumerate(run.weights):
        others = [j for j, classes in enumerate(run.classes) if j != i and classes == run.classes[i]]
        inside = [weights.get(str(j), 0.0) for j in others]
        found.append(100.0 * (max(inside) - min(inside)) / fmean(inside))
    return fmean(found)


def _prototypes(run: Summary) -> list[float]:
    return [messages for _, messages in run.curves["sent Prototypes"]]


def saved(runs: Runs) -> float:
    """Percentage of the messages that the graph saves."""
    return 100.0 * (1.0 - sum(_prototypes(runs["mapl"])) / sum(_prototypes(runs["without graph"])))


def within_budget(runs: Runs) -> float:
    """Accuracy with a learned graph minus without, when both have sent 43 % of what a run without a graph sends."""
    limit = 0.43 * sum(_prototypes(runs["without graph"]))
    rounds = {name: sum(spent <= limit for spent in accumulate(_prototypes(run))) for name, run in runs.items()}
    return runs["mapl"].settled(until=rounds["mapl"]) - runs["without graph"].settled(until=rounds["without graph"])


def cost_of_steps(runs: Runs) -> float:
    """Accuracy with one step on the graph minus the mean with more."""
    return runs["E_g 1"].last() - fmean(run.last() for name, run in runs.items() if name != "E_g 1")


def separable(runs: Runs) -> float:
    """How often a pair of heads inside a cluster is more similar than a pair across, in percent."""
    return only(runs).probe["separable"]


def payload(runs: Runs) -> float:
    """Numbers in the payload of a run without pruning, as a ratio to 2·N_e·(d·K·T + |φ|·(T − T_thr)).

    The paper counts heads from the first round on.
    """
    sent = sum(only(runs).messages[kind][1] for kind in ("Prototypes", "Head")) / 4
    peers, rounds, warmup, prototype = 10, 30, 8, 64 * 10
    return sent / (peers * (peers - 1) * prototype * (rounds + rounds - warmup))


# L2C


def above_trained(runs: Runs) -> float:
    """How far the first run is above Ditto after the last round, over the peers that Ditto has ever trained.

    With a tenth of the peers per round, an eighth of them never takes part in 20 rounds; in the paper's 100, none.
    """
    one, ditto = runs.values()
    pairs = zip(one.accuracies, ditto.accuracies, strict=True)
    return fmean(mine - other for mine, other in pairs if other > TRAINED)


def shared_classes(runs: Runs) -> float:
    """Correlation, over ordered pairs of peers, of w_ij with the number of shared classes."""
    run = only(runs)
    classes = [set(found) for found in run.classes]
    pairs = [
        (len(classes[i] & classes[int(j)]), weight)
        for i, row in enumerate(run.weights)
        for j, weight in row.items()
        if int(j) != i
    ]
    return float(np.corrcoef(np.array(pairs).T)[0, 1])


def found(runs: Runs) -> float:
    """Percentage of the peers whose largest weights belong to peers of their group, after the last round."""
    return only(runs).last("right")


def found_at_first(runs: Runs) -> float:
    """``found``, after the first round."""
    return only(runs).at(1, "right")


def more_robust(runs: Runs) -> float:
    """Spread of FedFomo's last accuracies minus the spread of the other method's."""
    fomo, other = (
        [run for label, run in runs.items() if label.startswith("fedfomo") == is_fomo] for is_fomo in (True, False)
    )
    return _spread(fomo) - _spread(other)


# FedTGP


def kept(runs: Runs) -> float:
    """Smallest distance of global prototypes, as a ratio to the largest one of a peer."""
    return only(runs).last("margin") / only(runs).last("peer_margin")


def wider(runs: Runs) -> float:
    """Percentage of the classes whose global margin is larger than any peer's, after the last round."""
    return 100.0 * only(runs).last("wider")


def wider_at_first(runs: Runs) -> float:
    """The mean of these percentages after rounds 1 to 100, in which accuracy grows."""
    return 100.0 * fmean(fraction for t, fraction in only(runs).curves["wider"] if t <= 100)


def rounds_behind(runs: Runs) -> float:
    """Rounds until FedTGP reaches FedProto's best accuracy, or all of them, minus FedProto's."""
    goal = best(runs["fedproto"])
    limit = float(runs["fedtgp"].curves["pooled"][-1][0])
    fedtgp, fedproto = (runs[name].first_to_reach(goal, "pooled") for name in ("fedtgp", "fedproto"))
    return min(limit, fedtgp) - fedproto


def drop(runs: Runs) -> float:
    """How far the accuracy falls below its best in the rounds after the 100th."""
    return best(only(runs)) - min(value for t, value in only(runs).curves["pooled"] if t > 100)


def of_formula(runs: Runs) -> float:
    """Numbers that were sent, as a ratio to those that the formula says."""
    return only(runs).probe["counted"] / only(runs).probe["formula"]


# DFML


def by_network(run: Summary, networks: int) -> list[float]:
    """Accuracy of the regular models after the last round, by network: peer i has number i modulo ``networks``."""
    return [fmean(run.accuracies[n::networks]) for n in range(networks)]


def mixed_networks_cost(runs: Runs) -> float:
    """What peers with `tiny-cnn` lose where the others have other networks."""
    return final(runs["one network"]) - by_network(runs["mixed"], 4)[0]


def largest_above_smallest(runs: Runs) -> float:
    """Accuracy of the largest of three networks minus the smallest's."""
    smallest, _, largest = by_network(only(runs), 3)
    return largest - smallest


def least_gain(runs: Runs) -> float:
    """The difference of two runs' accuracies, of the network of four that gains least."""
    one, other = (by_network(run, 4) for run in runs.values())
    return min(mine - theirs for mine, theirs in zip(one, other, strict=True))


def gains_more(runs: Runs) -> float:
    """DFML's lead over decentralized FedAvg on non-IID data minus the lead on IID data."""
    non_iid, iid = (final(runs[f"dfml{data}"]) - final(runs[f"fedavg-dec{data}"]) for data in ("", ", IID"))
    return non_iid - iid


def loses_more(runs: Runs) -> float:
    """What a method's last accuracy loses where the peers' networks differ, minus what DFML's loses."""
    dfml, method = (final(runs[f"{name}, one network"]) - final(runs[name]) for name in list(runs)[:2])
    return method - dfml


def above_alpha_1(runs: Runs) -> float:
    """The worse of α = 0.5 and α = 0.8 throughout, minus α = 1."""
    return min(final(runs["α = 0.5"]), final(runs["α = 0.8"])) - final(runs["α = 1"])


def memes_above(runs: Runs) -> float:
    """``area`` of decentralized FML's memes minus DFML's."""
    return _area(runs["fml-dec"], "meme") - area(runs["dfml"])


def above_last(runs: Runs) -> float:
    """DFML's last accuracy minus ANL-KD's of the regular models: its peak models are from its first round."""
    return final(runs["dfml"]) - runs["anl-kd"].last()


def times_as_fast(runs: Runs) -> float:
    """Rounds of the run without distillation, by those until DFML reaches its last accuracy, in steps of five.

    If DFML never does, the rounds until the other reaches DFML's last accuracy, by DFML's: less than 1.
    """
    rounds = float(MAXIMA[-1])
    reached = runs["dfml"].first_to_reach(final(runs["α = 0"]), "peak")
    if reached <= rounds:
        return rounds / reached
    return runs["α = 0"].first_to_reach(final(runs["dfml"]), "peak") / rounds


def rounds_saved(runs: Runs) -> float:
    """Rounds, in steps of five, until the peak models reach the baseline's last accuracy; 200 if they never do."""
    return min(200.0, runs["dfml"].first_to_reach(runs["fedavg-dec"].last(), "peak"))


def rise(runs: Runs) -> float:
    """Regular models: accuracy at the maxima of α minus that where α is below a half, from the second period on."""
    return fmean(only(runs).at(t) for t in MAXIMA[1:]) - _where(only(runs), lambda alpha: alpha < 0.5)


def swing(runs: Runs) -> float:
    """Regular models: accuracy where α is above 0.8 minus that where it is below 0.2, from the second period on."""
    return _where(only(runs), lambda alpha: alpha > 0.8) - _where(only(runs), lambda alpha: alpha < 0.2)


def _where(run: Summary, inside: Callable[[float], bool]) -> float:
    alpha = dict(run.curves["alpha"])
    return fmean(value for t, value in run.curves["accuracy"] if t > MAXIMA[0] and inside(alpha[t]))


def keep(runs: Runs) -> float:
    """Peak models minus regular ones, in the rounds between the last two maxima of α."""
    run = only(runs)
    between = [t for t, _ in run.curves["peak"] if MAXIMA[-2] < t < MAXIMA[-1]]
    return fmean(run.at(t, "peak") - run.at(t) for t in between)


# FedStyle


def since_round_15(runs: Runs) -> float:
    """FedStyle's last accuracy minus its accuracy after round 15."""
    return runs["fedstyle"].last() - runs["fedstyle"].at(15)


def stylized_above_content(runs: Runs) -> float:
    """FedStyle's accuracy minus its accuracy with the content feature alone."""
    return runs["fedstyle"].last() - runs["fedstyle"].probe["content alone"]


def content_alone_above(runs: Runs) -> float:
    """FedStyle's accuracy with the content feature alone minus FedAvg's."""
    return runs["fedstyle"].probe["content alone"] - runs["fedavg"].last()
