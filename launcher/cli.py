"""The door to the ``p2pfl`` command."""

from __future__ import annotations

import sys
from importlib import metadata


def main() -> None:
    """Run the command; what it can do is listed in ``launcher.commands``."""
    refuse_namesake()
    # Only now: where the namesake is installed too, its files lie among those of our package p2pfl.
    from launcher.commands import commands

    commands(prog_name="p2pfl")


def refuse_namesake() -> None:
    """Leave with an explanation if the distribution ``p2pfl``, another project's, shares our environment."""
    try:
        version = metadata.version("p2pfl")
    except metadata.PackageNotFoundError:
        return
    sys.exit(
        f"p2pfl {version}, another project's distribution, is installed in the same environment as p2pfl-mesh. "
        "Both own the package p2pfl, so neither can work. Remove both, then install p2pfl-mesh again:\n"
        f"    {sys.executable} -m pip uninstall p2pfl p2pfl-mesh"
    )


if __name__ == "__main__":
    main()
