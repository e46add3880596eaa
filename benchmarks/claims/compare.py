"""Fourteen algorithms on one partition: topologies/compare, each method against local training.

Every peer trains for as many local epochs as the others, as far as whole rounds allow (DFML and its baselines train
half of the peers per round, so they have more rounds; DFML's mutual learning comes on top), with a learning rate
chosen on held-out training images from one grid for SGD and one for Adam, which are extended where the best is at an
end. The files have the chosen ones.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim, Settings, difference
from benchmarks.claims.declared import TOPOLOGIES, tree_of
from benchmarks.claims.figures import settled

SGD, ADAM = (0.01, 0.02, 0.04), (0.001, 0.002, 0.004)


def methods() -> dict[str, Settings]:
    """Return the runs by method."""
    found = {}
    for file in sorted((TOPOLOGIES / "compare").glob("*.yaml")):
        tree = tree_of(file)
        rates = ADAM if file.stem in ("mapl", "mapl+") else SGD
        series = "peak" if file.stem == "dfml" else "accuracy"
        found[file.stem] = Settings(tree, rates=rates, series=series)
    return found


METHODS = methods()
CLAIMS = tuple(
    Claim(
        f"{name} against local training",
        "ours",
        {name: settings, "local": METHODS["local"]},
        difference(name, "local", settled),
        "—",
        "—",
        whose="ours",
        curves="",
    )
    for name, settings in METHODS.items()
    if name != "local"
)
