"""Entry point of the ``p2pfl`` command."""

from __future__ import annotations

import sys
from importlib import metadata


def main() -> None:
    """Run the command line."""
    reject_conflicting_distribution()
    # Import late: the other distribution installs its files into the same package, p2pfl.
    from launcher.commands import commands

    commands(prog_name="p2pfl")


def reject_conflicting_distribution() -> None:
    """Exit with an explanation if the unrelated distribution ``p2pfl`` is installed in this environment."""
    try:
        version = metadata.version("p2pfl")
    except metadata.PackageNotFoundError:
        return
    sys.exit(
        f"p2pfl {version}, an unrelated distribution, is installed in the same environment as p2pfl-mesh. "
        "Both provide the package p2pfl, so neither can work. Remove both, then reinstall p2pfl-mesh:\n"
        f"    {sys.executable} -m pip uninstall p2pfl p2pfl-mesh"
    )


if __name__ == "__main__":
    main()
