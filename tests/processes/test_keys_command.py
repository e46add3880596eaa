"""`p2pfl keys new`, and a launch with missing keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher_fixtures import Invoke


def test_creates_keys_for_a_number_of_peers(
    tmp_path: Path, invoke: Invoke, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    outcome = invoke("keys", "new", 12, "--into", folder)
    assert outcome.exit_code == 0
    assert outcome.stdout == (
        f"{folder}: created 12 private keys, and their public keys in {folder}/public.yaml\n"
        f"use them in the run file: transport: {{keys: {folder}}}\n"
    )
    assert sorted(path.name for path in folder.glob("*.key")) == [f"{peer:02d}.key" for peer in range(12)]
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}
    public = (folder / "public.yaml").read_text().splitlines()
    assert [re.sub("[0-9a-f]{64}$", "…", line) for line in public] == [f"{peer}: …" for peer in range(12)]
    private = [path.read_text().strip() for path in folder.glob("*.key")]
    assert len({*private, *(line[-64:] for line in public)}) == 24
    printed = outcome.output + "".join(capfd.readouterr())
    assert not any(key in printed for key in private)


def test_creates_keys_for_a_run_file(file: Path, tmp_path: Path, invoke: Invoke) -> None:
    file.write_text(file.read_text() + "transport: {host: 0.0.0.0}\n")
    assert invoke("keys", "new", file, "--into", tmp_path / "keys").exit_code == 0
    assert len(list((tmp_path / "keys").glob("*.key"))) == 3


def test_creates_keys_of_selected_peers(tmp_path: Path, invoke: Invoke) -> None:
    for host, peers in (("a", (0, 2)), ("b", (1,))):
        chosen = [argument for peer in peers for argument in ("--peer", peer)]
        assert invoke("keys", "new", 3, "--into", tmp_path / host, *chosen).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["00.key", "02.key", "public.yaml"]
    assert [line[:2] for line in (tmp_path / "b" / "public.yaml").read_text().splitlines()] == ["1:"]


@pytest.mark.parametrize("number", [300000, 99999999999999])
def test_too_many_peers_are_refused_at_once(tmp_path: Path, invoke: Invoke, number: int) -> None:
    outcome = invoke("keys", "new", number, "--into", tmp_path / "keys")
    assert outcome.exit_code == 2
    assert "a run has at most 100000 peers" in outcome.stderr


def test_does_not_overwrite_keys(tmp_path: Path, invoke: Invoke, capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke("keys", "new", 2, "--into", tmp_path / "keys").exit_code == 0
    before = (tmp_path / "keys" / "00.key").read_text()
    outcome = invoke("keys", "new", 2, "--into", tmp_path / "keys")
    assert outcome.exit_code == 1
    assert "keys: not empty" in capfd.readouterr().err
    assert (tmp_path / "keys" / "00.key").read_text() == before


def test_creates_a_folder_per_peer(tmp_path: Path, invoke: Invoke) -> None:
    folder = tmp_path / "keys"
    outcome = invoke("keys", "new", 3, "--into", folder, "--apart")
    assert outcome.stdout == f"{folder}: created 3 key pairs, each with the public keys of all\n"
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("*/*")) == [
        name for peer in ("00", "01", "02") for name in (f"{peer}/{peer}.key", f"{peer}/public.yaml")
    ]
    before = {path: path.read_bytes() for path in folder.glob("*/*")}
    outcome = invoke("keys", "new", 3, "--into", folder, "--apart", "--owner", os.geteuid())
    assert outcome.stdout == f"{folder}: created 0 key pairs, each with the public keys of all; kept 3 existing\n"
    assert {path: path.read_bytes() for path in folder.glob("*/*")} == before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--owner", "root"], "--owner requires --apart"), (["--apart", "--owner", "no-such-user"], "no user")],
)
def test_rejects_invalid_owners(tmp_path: Path, invoke: Invoke, arguments: list[Any], problem: str) -> None:
    outcome = invoke("keys", "new", 3, "--into", tmp_path / "keys", *arguments)
    assert outcome.exit_code == 2
    assert problem in outcome.stderr
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("arguments", [[0], [2, "--peer", 2], ["nothing.yaml"]])
def test_rejects_unknown_peers(tmp_path: Path, invoke: Invoke, arguments: list[Any]) -> None:
    assert invoke("keys", "new", *arguments, "--into", tmp_path / "keys").exit_code == 2
    assert not (tmp_path / "keys").exists()


def test_creates_keys_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom peers.keys import main\nassert main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "keys"), "0"], check=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda keys: keys.joinpath("01.key").unlink(), r"01\.key: not found; copy it to the host where peer 1 runs"),
        (lambda keys: keys.joinpath("01.key").chmod(0o640), r"01\.key: mode 0640 gives others access to"),
        (lambda keys: keys.joinpath("public.yaml").write_text(""), r"public\.yaml: no key of peer 0, 1, 2"),
        (
            lambda keys: keys.joinpath("01.key").write_text(keys.joinpath("02.key").read_text()),
            r"01\.key: does not match public key [0-9a-f]{12}… of peer 1",
        ),
    ],
)
def test_a_launch_without_valid_keys_starts_no_peer(
    file: Path, tmp_path: Path, invoke: Invoke, change: Any, problem: str
) -> None:
    folder = tmp_path / "keys"
    assert invoke("keys", "new", 3, "--into", folder).exit_code == 0
    change(folder)
    file.write_text(file.read_text() + f"transport:\n  keys: {folder}\n")
    outcome = invoke("launch", file)
    assert outcome.exit_code == 2
    assert re.match(rf"error: {file}:9: transport\.keys: {folder}/{problem}", outcome.stderr)
    assert not (tmp_path / "runs").exists()
