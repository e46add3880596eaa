"""The hash by which peers compare their runs: ``<SHA-256 of the settings>+my_method 1a2b3c4d5e6f…``.

It names the plug-ins, so that peers with different versions can say which. Without plug-ins it is the hash alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from p2pfl import PeerId

FROZEN = "frozen parameters"
"""Listed like a plug-in where peers start from equal models, and do not exchange all of their parameters."""
DIFFERENT = (
    "differ between peers, which do not exchange them: let the model's constructor draw them from the random numbers "
    "of torch or NumPy, or load the same file on all hosts"
)
MAX_LISTED = 1024
"""Characters that list plug-ins. A longer list is replaced by its hash: the message that holds it is bounded."""


def join(settings: str, plugins: Mapping[str, str]) -> str:
    """Return the hash of a run.

    Args:
        settings: hash of everything but the code of plug-ins.
        plugins: {name: hash of its sources}.
    """
    if not plugins:
        return settings
    listed = ", ".join(f"{name} {sha256[:32]}" for name, sha256 in sorted(plugins.items()))
    if len(listed) > MAX_LISTED:
        listed = f"{len(plugins)} plug-ins {hashlib.sha256(listed.encode()).hexdigest()[:32]}"
    return f"{settings}+{listed}"


def settings_of(config_hash: str) -> str:
    """Return the part that does not depend on the code of plug-ins."""
    return config_hash.partition("+")[0]


def mismatch(peer: PeerId, theirs: str, me: PeerId, ours: str) -> str:
    """Describe how the hashes of two peers differ."""
    settings = settings_of(theirs), settings_of(ours)
    if settings[0] != settings[1]:
        return (
            f"run file differs: its hash is {settings[0][:12]}… at peer {peer}, {settings[1][:12]}… at peer {me}; "
            "give all peers the same run file"
        )
    both = _versions(theirs), _versions(ours)
    differ = [name for name in sorted({*both[0], *both[1]}) if both[0].get(name) != both[1].get(name)]
    if differ == [FROZEN]:
        one, other = (versions.get(FROZEN, "(none)")[:12] for versions in both)
        return f"frozen parameters {DIFFERENT}; their hash is {one}… at peer {peer}, {other}… at peer {me}"
    texts = [", ".join(f"{name} {versions.get(name, '(none)')[:12]}" for name in differ) for versions in both]
    return (
        f"plug-ins differ: peer {peer} has {texts[0][:200]}, peer {me} has {texts[1][:200]}; "
        "give all peers the same files"
    )


def _versions(config_hash: str) -> dict[str, str]:
    listed = re.sub(r"[^\w ,.-]", "?", config_hash.partition("+")[2])  # a neighbor may send anything
    pairs = (item.rpartition(" ") for item in listed.split(", ") if item)
    return {name: sha256 for name, _, sha256 in pairs}
