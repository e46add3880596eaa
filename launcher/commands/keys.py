"""The command ``p2pfl keys new``."""

from __future__ import annotations

import pwd
import subprocess
import sys
from pathlib import Path

import click

from launcher.commands.group import SETS
from launcher.formatting.console import echo
from p2pfl import MAX_PEERS


@click.group()
def keys() -> None:
    """Create keys for authentication and encryption."""


@keys.command("new")
@click.argument("source", metavar="FILE|N")
@click.option("--into", type=click.Path(path_type=Path), default=Path("keys"), show_default=True, help="New folder.")
@click.option("--peer", "peers", type=click.IntRange(min=0), multiple=True, help="Only for this peer; repeatable.")
@click.option(
    "--apart", is_flag=True, help="Create a folder per peer: 03/03.key, 03/public.yaml. Keep existing key pairs."
)
@click.option("--owner", metavar="USER", help="With --apart: name or id of the user who will own the private keys.")
@SETS
def new_keys(
    source: str, into: Path, peers: tuple[int, ...], apart: bool, owner: str | None, sets: tuple[str, ...]
) -> None:
    """Create a key pair for each peer of the run FILE, or of N peers.

    A peer needs its own private key and the public keys of all peers, public.yaml. With --peer, create only the keys
    of one host's peers, so that private keys never travel; then concatenate the public.yaml files of all hosts.
    """
    from p2pfl.run_folder import key_files

    if owner is not None and not apart:
        raise click.UsageError("--owner requires --apart")
    if source.isdecimal():
        count = int(source)
    else:
        from p2pfl.run_file.load import load

        count = load(Path(source), [*sets, "transport={}"]).peers  # transport may name keys that do not exist yet
    absent = [peer for peer in peers if peer >= count]
    if count > MAX_PEERS:
        raise click.BadParameter(f"a run has at most {MAX_PEERS} peers", param_hint="N")
    if absent or not count:
        raise click.BadParameter(f"there are {count} peers", param_hint="--peer" if absent else "N")
    chosen = sorted(set(peers)) or range(count)
    # Another process creates the keys, with ZeroMQ; this one never sees a private key.
    command = [sys.executable, "-P", "-m", "peers.keys", str(into), *map(str, chosen)]
    folders = {peer: key_files.peer_key_folder(into, peer) for peer in chosen if apart}
    existing = [peer for peer, folder in folders.items() if key_files.private_file(folder, peer).exists()]
    if apart:
        command += ["--apart", *(["--owner", str(_user_id(owner))] if owner is not None else [])]
    if code := subprocess.run(command).returncode:
        sys.exit(code)
    if apart:
        kept = f"; kept {len(existing)} existing" if existing else ""
        echo(f"{into}: created {len(chosen) - len(existing)} key pairs, each with the public keys of all{kept}")
        return
    echo(f"{into}: created {len(chosen)} private keys, and their public keys in {into / 'public.yaml'}")
    echo(f"use them in the run file: transport: {{keys: {into}}}")


def _user_id(user: str) -> int:
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise click.BadParameter(f"no user {user!r} on this host", param_hint="--owner") from None
