"""What the ``p2pfl`` command can do. Each command imports what it needs when it runs, so that none waits for
torch that does without it.

Exit codes: 0 done; 1 something did not finish, differs or cannot be read; 2 the command line or the run file
is wrong.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pfl.errors import P2pflError, RunFileError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.local import Restart
    from launcher.logs import Entry
    from launcher.runs import RunLine
    from launcher.summary import Summary
    from p2pfl.runfolder import RunFolder

Command = Callable[..., Any]


class Commands(click.Group):
    """Shows our own errors as their message, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except P2pflError as error:
            click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True)
            ctx.exit(2 if isinstance(error, RunFileError) else 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="p2pfl-mesh", prog_name="p2pfl-mesh")
def commands() -> None:
    """Peer-to-peer personalized learning: every client a process, no server."""


RUN = click.argument("run", type=click.Path(path_type=Path))
FILE = click.argument("file", type=click.Path(path_type=Path))
SETS = click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. algorithm.lr=0.01.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def run_options(command: Command) -> Command:
    """What ``launch`` and ``simulate`` have in common."""
    for option in (
        JSON,
        click.option("--run-dir", type=click.Path(path_type=Path), help="Folder of the run, new or empty."),
        click.option("--rounds", type=click.IntRange(min=1), help="Short for --set rounds=N."),
        click.option("--seed", type=click.IntRange(min=0), help="Short for --set seed=N."),
        SETS,
        FILE,
    ):
        command = option(command)
    return command


# ---- running ------------------------------------------------------------------------------------------------


RESTART = click.option(
    "--restart",
    type=click.Choice(["on-failure", "always", "never"]),
    default="on-failure",
    show_default=True,
    help="Start peers again that end before they have finished: from their checkpoint, as if nothing had happened.",
)


@commands.command()
@RESTART
@run_options
def launch(as_json: bool, restart: Restart, **order: Any) -> None:
    """Start one process per peer, follow them, sum up.

    Ctrl-C stops the peers, a second one kills them. Whatever else ends this command, the peers go on (`p2pfl stop`).
    """
    from launcher.local import launch as run_peers
    from launcher.prepare import Order

    _run(lambda console: run_peers(Order(**order), console, restart), as_json)


@commands.command()
@RESTART
@RUN
@JSON
def resume(run: Path, restart: Restart, as_json: bool) -> None:
    """Go on with a run after a stop, a crash or a reboot.

    Starts the peers that do not live, each from its checkpoint.
    """
    _resume(run, (), restart, as_json)


@commands.command()
@RESTART
@RUN
@click.option("--peer", "peers", type=int, multiple=True, required=True, metavar="N", help="Which; may be repeated.")
@JSON
def join(run: Path, peers: tuple[int, ...], restart: Restart, as_json: bool) -> None:
    """Bring peers back into a run that goes on.

    Each goes on from its checkpoint; or, if its neighbours have given it up meanwhile, in their round.
    """
    _resume(run, peers, restart, as_json)


def _resume(run: Path, peers: tuple[int, ...], restart: Restart, as_json: bool) -> None:
    from launcher.local import resume as resume_peers
    from p2pfl.runfolder import RunFolder

    _run(lambda console: resume_peers(RunFolder.open(run), peers, console, restart), as_json)


@commands.command()
@run_options
def simulate(as_json: bool, **order: Any) -> None:
    """Run all peers in one process, without sockets.

    The result is the same bits, the same files and the same summary as those of launch, on the CPU. The run file's
    chaos is left out: it is the calm run that one with faults is compared with.
    """
    from launcher.prepare import Order
    from launcher.simulation import simulate as run_here

    # Its peers keep nothing that they have sent, so one that goes on would miss what others have said in that round.
    _run(lambda console: run_here(Order(**order), console), as_json, can_go_on=False)


def _run(backend: Callable[[Console], tuple[RunFolder, Summary]], as_json: bool, *, can_go_on: bool = True) -> None:
    from launcher.summary import failures, show

    console = _console(err=as_json)
    folder, summary = backend(console)
    if as_json:
        click.echo(json.dumps(summary.to_dict()))
    else:
        show(summary, console)
    for line in failures(summary):
        click.echo(line, err=True)
    if can_go_on and any(peer.ended == "stopped" for peer in summary.peers):
        click.echo(f"it can go on from its checkpoints: p2pfl resume {_typed(folder.root)}", err=True)
    sys.exit(0 if summary.finished else 1)


def _typed(path: Path) -> str:
    """A path as one would type it into a shell here."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if here in path.parents else path))


@commands.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def peer(arguments: tuple[str, ...]) -> None:
    """Be one peer: --run RUN --me N [--file FILE]. It goes on after its last checkpoint."""
    # Not -m peers: it would call itself by that name where it tells how to call it.
    program = "from peers.__main__ import main; main(prog_name='p2pfl peer')"
    os.execv(sys.executable, [sys.executable, "-P", "-c", program, *arguments])


# ---- looking at runs ----------------------------------------------------------------------------------------


@commands.command("list")
@click.argument("where", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@JSON
def list_runs(where: Path | None, as_json: bool) -> None:
    """The runs in DIR (default: runs) and how they do."""
    from launcher.runs import find_runs
    from launcher.text import percent

    folder = where or Path("runs")
    # The first launch makes the folder; whoever asks before has made no mistake.
    lines = list(find_runs(folder)) if where is not None or folder.exists() else []
    if as_json:
        click.echo(json.dumps([vars(line) for line in lines]))
        return
    if not lines:
        click.echo(f"no runs yet in {folder}")
        return
    rows = [
        [
            line.run,
            _state(line),
            f"{line.rounds_done}/{line.rounds}",
            percent(line.accuracy),
            line.started,
        ]
        for line in lines
    ]
    _table(["run", "state", "rounds", "acc %", "started"], rows)


def _state(line: RunLine) -> str:
    if line.alive:
        return f"running ({line.alive} of {line.peers} peers)"
    return f"{line.state} (collected {line.collected[:16]})" if line.collected else line.state


@commands.command()
@RUN
@click.option("--peer", "peers", type=click.IntRange(min=0), multiple=True, help="Only this peer; repeatable.")
@click.option("-f", "--follow", "follow", is_flag=True, help="Go on until these peers have ended.")
@click.option("--grep", "pattern", metavar="REGEX", default="", help="Only entries that match.")
@click.option("-i", "--ignore-case", is_flag=True, help="With --grep: upper and lower case are the same.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last N entries of what is there.")
def logs(run: Path, peers: tuple[int, ...], follow: bool, pattern: str, ignore_case: bool, lines: int | None) -> None:
    """What the peers of RUN say, merged by time."""
    from launcher.logs import follow as follow_logs
    from launcher.logs import last, open_logs, read_all
    from p2pfl.runfolder import RunFolder

    try:
        matches = re.compile(pattern, re.IGNORECASE if ignore_case else 0).search
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint="--grep") from None
    folder = RunFolder.open(run)
    files = open_logs(folder, peers)
    several = len(files) > 1
    for entry in last(read_all(files, matches), lines):
        _show_entry(entry, several)
    if follow and "collected" in folder.about:
        click.echo(f"that is all that was collected; for what has been said since: p2pfl collect {run}", err=True)
    elif follow:
        try:
            for entry in follow_logs(folder, files, matches):
                _show_entry(entry, several)
        except KeyboardInterrupt:  # how one leaves it: nothing was aborted
            click.echo(err=True)  # after the terminal's ^C
            sys.exit(128 + signal.SIGINT)


def _show_entry(entry: Entry, several: bool) -> None:
    colors = ("cyan", "green", "yellow", "magenta", "blue", "red")
    prefix = click.style(f"{entry.peer:>3} │ ", fg=colors[entry.peer % len(colors)]) if several else ""
    for line in entry.text.splitlines():
        click.echo(prefix + line)


@commands.command()
@RUN
@click.argument("other", metavar="[RUN2]", required=False, type=click.Path(path_type=Path))
@JSON
def digest(run: Path, other: Path | None, as_json: bool) -> None:
    """Hash every peer's final state, or compare two runs.

    Prints the SHA-256 of each. With RUN2, names the peers that differ, and those that have not finished and so cannot
    be compared; exits with 1 if there are any.
    """
    from dataclasses import asdict

    from launcher.digests import compare, digests, unfinished
    from launcher.text import ids
    from p2pfl.runfolder import RunFolder

    one = RunFolder.open(run)
    if other is None:
        found = digests(one)
        if as_json:
            click.echo(json.dumps([vars(found[peer]) for peer in sorted(found)]))
        else:
            _table(
                ["peer", "rounds", "digest"],
                [[str(peer), str(found[peer].rounds_done), found[peer].digest] for peer in sorted(found)],
            )
        if left := unfinished(one):
            click.echo(str(left), err=True)
        return
    compared = compare(one, RunFolder.open(other))
    if as_json:
        click.echo(json.dumps({"same": compared.same, **asdict(compared)}))
        sys.exit(0 if compared.same else 1)
    if compared.same:
        click.echo("the same: all peers ended with the same bits")
        return
    if compared.peers[0] != compared.peers[1]:
        click.echo(f"different: {run} is a run of {compared.peers[0]} peers, {other} of {compared.peers[1]}")
    if compared.differ:
        click.echo(f"different: peers {', '.join(map(str, compared.differ))}")
    for path, left, absent in zip((run, other), compared.unfinished, compared.absent, strict=True):
        if left:
            click.echo(f"{path}: {left}")
        if absent:
            click.echo(f"{path}: nothing of peers {ids(absent)} is there")
    if compared.agree and not compared.differ:
        click.echo(f"the same: peers {ids(compared.agree)}")
    sys.exit(1)


@commands.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@JSON
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Runs side by side: accuracy, traffic, time.

    Says so where runs differ in more than their algorithm. Exits with 1 if a peer of one of them did not finish.
    """
    from dataclasses import asdict

    from launcher.compare import differences, lines, measures, table
    from p2pfl.runfolder import RunFolder

    folders = [RunFolder.open(run) for run in runs]
    compared = lines(folders)
    different = differences(folders)
    if as_json:
        click.echo(json.dumps({"runs": [asdict(line) for line in compared], "different": different}))
    else:
        console = _console()
        console.print(table(compared))
        if (others := measures(compared)) is not None:
            console.print()
            console.print(others)
        for key, values in different.items():
            click.echo(f"not the same in all of them: {key}: {'; '.join(map(json.dumps, values))}", err=True)
    sys.exit(0 if all(line.finished == line.peers for line in compared) else 1)


@commands.command()
@RUN
@click.option("--kill", is_flag=True, help="At once, without a last checkpoint.")
def stop(run: Path, kill: bool) -> None:
    """Stop the living peers of RUN.

    Each ends its batch, goes back to the last completed round, writes a checkpoint and leaves.
    """
    from launcher.runs import stop as stop_peers
    from p2pfl.runfolder import RunFolder

    stops = stop_peers(RunFolder.open(run), kill=kill)
    if not stops:
        click.echo("no peer of this run is running")
    for one in stops:
        click.echo(f"peer {one.peer}: {one.ended or 'still running; p2pfl stop --kill ends it at once'}")
    sys.exit(1 if any(one.ended is None for one in stops) else 0)


@commands.command()
@click.argument("into", type=click.Path(path_type=Path))
@click.argument("sources", metavar="[SOURCE]...", nargs=-1)
@click.option(
    "--compose",
    is_flag=False,
    flag_value=".",
    metavar="[FILE]",
    help="All peers' containers of a compose project: of FILE, or of the one in this folder.",
)
@click.option("--checkpoints", is_flag=True, help="Take these too; they are large.")
@JSON
def collect(into: Path, sources: tuple[str, ...], compose: str | None, checkpoints: bool, as_json: bool) -> None:
    """Gather what peers elsewhere have written into one run folder, INTO, and sum up.

    A SOURCE is a run folder or a folder of such, HOST:FOLDER (over ssh), or container:NAME. INTO is new, or has been
    collected before and is brought up to date; without a SOURCE from those of the last time. The run may go on
    meanwhile. Exits with 1 if something could not be read.
    """
    from launcher.collect import collect as gather
    from launcher.summary import failures, show

    console = _console(err=as_json)
    given = [*sources, *([] if compose is None else [f"compose:{compose}"])]
    collected = gather(into, given, console.print, checkpoints)
    if as_json:
        click.echo(json.dumps(collected.summary.to_dict()))
    else:
        show(collected.summary, console)
    for line in failures(collected.summary):
        click.echo(line, err=True)
    for what, why in collected.unread.items():
        click.echo(f"{what}: cannot be read: {why}", err=True)
    click.echo(f"run: {collected.folder.root}", err=as_json)
    sys.exit(1 if collected.unread else 0)


# ---- looking things up --------------------------------------------------------------------------------------


@commands.command()
@click.argument("name", required=False)
@JSON
def algorithms(name: str | None, as_json: bool) -> None:
    """Algorithms and papers; with NAME, its hyper-parameters."""
    from launcher.describe import describe_algorithm
    from p2pfl.algorithms import ALGORITHMS
    from p2pfl.options import unknown

    if name is not None and name not in ALGORITHMS:
        raise click.BadParameter(unknown(name, ALGORITHMS), param_hint="NAME")
    found = [describe_algorithm(one) for one in ([name] if name else ALGORITHMS)]
    if as_json:
        click.echo(json.dumps(found[0] if name else found))
        return
    for one in found:
        click.echo(f"{click.style(one['name'], bold=True)}: {one['title']}")
        click.echo(f"    {one['gist']}")
        if paper := ", ".join(one[key] for key in ("authors", "venue", "url") if one[key] != "—"):
            click.echo(f"    {paper}")
        if name:
            click.echo()
            _table(
                ["hyper-parameter", "type", "default", ""],
                [[note["name"], note["type"], _as_written(note["default"]), note["text"]] for note in one["hyper"]],
            )


@commands.command()
@click.argument("name", required=False)
@click.option("--channels", type=click.IntRange(min=1), default=3, show_default=True, help="Of the images.")
@click.option("--size", type=click.IntRange(min=1), default=32, show_default=True, help="Their height and width.")
@click.option("--classes", type=click.IntRange(min=1), default=10, show_default=True, help="K.")
@click.option("--features", type=click.IntRange(min=1), help="d, instead of the group's.")
@JSON
def models(name: str | None, channels: int, size: int, classes: int, features: int | None, as_json: bool) -> None:
    """Groups of models and what their members cost; with NAME, of one group or one member.

    FLOPs are those of one image's way forward. Bytes are what a peer sends: the whole model, its head, a prototype
    of each class.
    """
    from launcher.describe import describe_models
    from p2pfl.models import GROUPS, MODELS, unknown_model

    if name is not None and name not in MODELS:
        raise click.BadParameter(unknown_model(name), param_hint="NAME")
    grouped = {member for group in GROUPS.values() for member in group.members}
    everything = [one for one in MODELS if one not in grouped]
    found = describe_models([name] if name else everything, channels, (size, size), classes, features)
    if as_json:
        click.echo(json.dumps(found[0] if name else found))
        return
    rows = []
    for group in found:
        for number, one in enumerate(group["members"]):
            head = [group["name"] if number == 0 else "", one["name"]]
            rows.append([*head, *_cost_columns(one)])
    _table(["group", "model", "parameters", "d", "FLOPs", "model", "head", "prototypes"], rows)
    for error in {one["error"] for group in found for one in group["members"] if "error" in one}:
        click.echo(f"no figures where {error}", err=True)


def _cost_columns(cost: dict[str, Any]) -> list[str]:
    from launcher.text import count, size

    if "error" in cost:
        return ["–"] * 6
    numbers = [count(cost["parameters"]), str(cost["features"]), count(cost["flops"])]
    return numbers + [size(cost[f"{what}_bytes"]) for what in ("model", "head", "prototype")]


@commands.command()
@FILE
@SETS
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw it into this file.")
@JSON
def graph(file: Path, sets: tuple[str, ...], png: Path | None, as_json: bool) -> None:
    """Degrees, diameter, spectral gap of a run file's graph."""
    from launcher.describe import describe_graph, draw_graph
    from p2pfl.config import load

    topology = load(file, sets).topology
    if png is not None:
        draw_graph(topology, png)
        click.echo(f"drawn: {png}", err=True)
    found = describe_graph(topology)
    if as_json:
        click.echo(json.dumps(found))
        return
    degree = found["degree"]
    diameter = f"none: {found['components']} components" if found["diameter"] is None else found["diameter"]
    click.echo(f"peers         {found['peers']}")
    click.echo(f"edges         {found['edges']}")
    click.echo(f"degree        {degree['min']} to {degree['max']}, mean {degree['mean']:.2f}")
    click.echo(f"diameter      {diameter}")
    click.echo(f"spectral gap  {found['spectral_gap']:.4f}")


@commands.command()
@FILE
@SETS
@click.option("--keys", type=click.Path(path_type=Path), help="Folder with the peers' keys; else new ones are made.")
@click.option("--image", metavar="NAME", help="Image to use; else one is built from the folder of the compose file.")
def compose(file: Path, **options: Any) -> None:
    """A compose file for a run FILE: a container for each peer.

    Prints it; `docker compose up` expects it in a docker-compose.yml.
    """
    from launcher.compose import Mesh

    click.echo(Mesh(file, **options).compose(), nl=False)


@commands.group()
def keys() -> None:
    """Make keys, by which peers know each other.

    What they say to each other is encrypted with them.
    """


@keys.command("new")
@click.argument("whom", metavar="FILE|N")
@click.option("--into", type=click.Path(path_type=Path), default=Path("keys"), show_default=True, help="New folder.")
@click.option("--peer", "peers", type=click.IntRange(min=0), multiple=True, help="Only for this peer; repeatable.")
@click.option(
    "--apart", is_flag=True, help="A folder for each peer: 03/03.key, 03/public.yaml. Pairs there are kept."
)
@click.option("--owner", metavar="USER", help="With --apart: name or number of the user who gets the private keys.")
@SETS
def new_keys(
    whom: str, into: Path, peers: tuple[int, ...], apart: bool, owner: str | None, sets: tuple[str, ...]
) -> None:
    """A key pair for each peer of a run FILE, or of N peers.

    A peer needs its own private key, and the public keys of all: public.yaml. With --peer, each host can make those
    of its own peers, so that private keys never travel: put the lines of all hosts' public.yaml together.
    """
    from p2pfl import keys

    if owner is not None and not apart:
        raise click.UsageError("--owner goes with --apart")
    if whom.isdecimal():
        count = int(whom)
    else:
        from p2pfl.config import load

        count = load(Path(whom), [*sets, "transport={}"]).peers  # which may ask for keys that are not there yet
    absent = [peer for peer in peers if peer >= count]
    if absent or not count:
        raise click.BadParameter(f"there are {count} peers", param_hint="--peer" if absent else "N")
    chosen = sorted(set(peers)) or range(count)
    # By a process of the package that has sockets; it writes them, and we never see a private one.
    making = [sys.executable, "-P", "-m", "peers.keys", str(into), *map(str, chosen)]
    kept = [peer for peer in chosen if apart and keys.private_file(keys.apart(into, peer), peer).exists()]
    if apart:
        making += ["--apart", *(["--owner", str(_user_id(owner))] if owner is not None else [])]
    if code := subprocess.run(making).returncode:
        sys.exit(code)
    if apart:
        made = f"{len(chosen) - len(kept)} private keys, and the public keys of all beside each"
        click.echo(f"{into}: {made}{f'; {len(kept)} were there' if kept else ''}")
        return
    click.echo(f"{into}: {len(chosen)} private keys, and {into / 'public.yaml'} with their public keys")
    click.echo(f"in the run file: transport: {{keys: {into}}}")


def _user_id(user: str) -> int:
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise click.BadParameter(f"no user {user!r} here", param_hint="--owner") from None


@commands.group()
def data() -> None:
    """Show how a dataset is divided among the peers."""


@data.command("show")
@FILE
@SETS
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw it into this file.")
@JSON
def show_data(file: Path, sets: tuple[str, ...], png: Path | None, as_json: bool) -> None:
    """Who gets which samples of a run file's dataset: per peer, sizes and classes.

    Classes are given with their training samples. Neighbouring peers that have equally much are shown as one.
    """
    from launcher.shares import describe, draw, rows
    from p2pfl.config import load
    from p2pfl.session import load_data

    run = load(file, sets)
    dataset, shares = load_data(run)
    found = describe(run, dataset, shares)
    if png is not None:
        draw(found, png)
        click.echo(f"drawn: {png}", err=True)
    if as_json:
        click.echo(json.dumps(found))
        return
    images = found["dataset"]
    click.echo(
        f"{images['name']}: {images['train']} training and {images['test']} test images "
        f"{'x'.join(map(str, images['shape']))}, {images['classes']} classes; partition {found['partition']['name']}"
    )
    _table(["peer", "group", "train", "val", "test", "training samples of each class"], rows(found))
    total = found["total"]
    click.echo(
        f"{total['train']} training samples in all, {total['distinct']} of them different; "
        f"a peer has {total['min']} to {total['max']}, {total['mean']:.1f} on average"
    )


# ---- output -------------------------------------------------------------------------------------------------


def _console(*, err: bool = False) -> Console:
    from rich.console import Console as RichConsole

    class Console(RichConsole):
        def on_broken_pipe(self) -> None:
            # Who read us has gone (`| head`, or Ctrl-C that ended `| tee`): no reason to leave peers unattended.
            self.quiet = True
            nobody = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nobody, self.file.fileno())  # also for what is in its buffer
            os.close(nobody)

    console = Console(stderr=err, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 160  # not 80, where tables would be cut
    return console


def _as_written(value: object) -> str:
    """As in a run file: null, true, [0.1, 1]."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _table(head: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    _console().print(table)
