"""`quartet keys generate`: split between those who bind and those who dial, and made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.services.cli.keys import main as keys_command
from quartet.shared import curve
from quartet.shared.curve import read_binder_keys, read_dialer_keys


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_each_side_gets_only_its_files(tmp_path: Path) -> None:
    assert keys_command(["generate", "--split", str(tmp_path)]) == 0
    assert sorted(contents(tmp_path)) == [
        "binder/client.key",
        "binder/server.key_secret",
        "dialer/client.key_secret",
        "dialer/server.key",
    ]
    binder, dialer = read_binder_keys(str(tmp_path / "binder")), read_dialer_keys(str(tmp_path / "dialer"))
    assert dialer.server_key == binder.public_key
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.key*")} == {0o600}


@pytest.mark.parametrize("split", [[], ["--split"]])
def test_a_key_set_that_is_there_stays(tmp_path: Path, split: list[str]) -> None:
    command = ["generate", "--if-missing", *split, str(tmp_path)]
    assert keys_command(command) == 0
    before = contents(tmp_path)
    assert len(before) == 4
    assert keys_command(command) == 0
    assert contents(tmp_path) == before
    assert keys_command(["generate", *split, str(tmp_path)]) == 1, "without the flag they are never taken for new ones"
    assert contents(tmp_path) == before


def test_a_part_of_a_key_set_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve.generate(str(tmp_path), split=True)
    (tmp_path / "dialer" / "server.key").unlink()
    assert keys_command(["generate", "--if-missing", "--split", str(tmp_path)]) == 1
    assert "dialer/server.key" in capsys.readouterr().err


def test_keys_of_two_sets_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve.generate(str(tmp_path / "a"), split=True)
    curve.generate(str(tmp_path / "b"), split=True)
    (tmp_path / "b" / "dialer" / "server.key").replace(tmp_path / "a" / "dialer" / "server.key")
    assert keys_command(["generate", "--if-missing", "--split", str(tmp_path / "a")]) == 1
    assert "different key sets" in capsys.readouterr().err
