from __future__ import annotations

import click

from benchmarks import fuzz
from benchmarks.fuzz.decoder import decoder, guided
from benchmarks.fuzz.live import live


@click.group(help=fuzz.__doc__, commands=[decoder, guided, live])
def main() -> None:
    return


if __name__ == "__main__":
    main()
