"""Fourteen algorithms on one partition: topologies/compare, each method against local training.

Every peer trains for as many local epochs as the others, as far as whole rounds allow (DFML and its baselines train
half of the peers per round, so they have more rounds; DFML's mutual learning comes on top), with a learning rate
chosen on held-out training images from one grid for SGD and one for Adam, which are extended where the best is at an
end. The files have the chosen ones.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim, Settings, difference
from benchmarks.claims.dfml_figures import series
from benchmarks.claims.paper_size import TOPOLOGIES, tree_of
from benchmarks.claims.summary import Summary

SGD, ADAM = (0.01, 0.02, 0.04), (0.001, 0.002, 0.004)
SECONDS = {"dfml": 150.0, "mapl": 70.0, "mapl+": 75.0, "l2c": 60.0, "meta-l2c": 90.0, "fedtgp": 80.0}


def methods() -> dict[str, Settings]:
    """Return the runs by method."""
    found = {}
    for file in sorted((TOPOLOGIES / "compare").glob("*.yaml")):
        tree = tree_of(file)
        rates = ADAM if file.stem in ("mapl", "mapl+") else SGD
        series = "peak" if file.stem == "dfml" else "accuracy"
        found[file.stem] = Settings(tree, SECONDS.get(file.stem, 40.0), rates, series)
    return found


def score(run: Summary) -> float:
    """Mean accuracy in the last quarter of the rounds, of the peak models where a method has them."""
    return run.settled(series(run))


METHODS = methods()
CLAIMS = tuple(
    Claim(
        f"{name} against local training",
        "ours",
        {name: settings, "local": METHODS["local"]},
        difference(name, "local", score),
        "—",
        "—",
        whose="ours",
        curves="",
    )
    for name, settings in METHODS.items()
    if name != "local"
)
