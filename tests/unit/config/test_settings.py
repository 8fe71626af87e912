"""Where settings come from, which one wins, and what is said when one is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from quartet.shared.config import (
    CommonSettings,
    SettingsError,
    default_run_dir,
    load_settings,
    parse_settings,
    peek_setting,
    prepare_run_dir,
)


class ExampleSettings(CommonSettings, frozen=True):
    max_num_seqs: Annotated[int, msgspec.Meta(description="rows at 100 % load", ge=1, le=1024)] = 256
    scheduler_link: Annotated[str, msgspec.Meta(description="where to dial")] = ""
    links: Annotated[list[str], msgspec.Meta(description="all of them")] = []
    memory: Annotated[float | None, msgspec.Meta(description="GiB; unset: what is free")] = None
    fraction: Annotated[float, msgspec.Meta(description="share", gt=0, le=1)] = 0.5
    fast: Annotated[bool, msgspec.Meta(description="faster")] = False
    dtype: Annotated[Literal["auto", "float32"], msgspec.Meta(description="type of weights")] = "auto"

    def __post_init__(self) -> None:
        if self.fast and self.dtype == "float32":
            raise ValueError("fast: not with dtype float32")


def parse(*argv: str, env: dict[str, str] | None = None, toml: str = "", tmp: Path | None = None) -> ExampleSettings:
    if toml:
        assert tmp is not None
        (tmp / "q.toml").write_text(toml)
        argv = ("--config", str(tmp / "q.toml"), *argv)
    return parse_settings(ExampleSettings, "executor", argv, env or {})


def test_each_source_beats_the_one_before(tmp_path: Path) -> None:
    toml = 'model = "top"\nlog_level = "debug"\n[executor]\nmodel = "section"\nmax_num_seqs = 1\n'
    assert parse().max_num_seqs == 256
    assert parse(toml=toml, tmp=tmp_path).model == "section"
    assert parse(toml=toml, tmp=tmp_path).log_level == "debug"
    env = {"QUARTET_MODEL": "env", "QUARTET_EXECUTOR_MAX_NUM_SEQS": "2"}
    settings = parse(toml=toml, tmp=tmp_path, env=env)
    assert (settings.model, settings.max_num_seqs) == ("env", 2)
    assert parse(env={**env, "QUARTET_EXECUTOR_MODEL": "own"}).model == "own"
    assert parse("--max-num-seqs", "3", toml=toml, tmp=tmp_path, env=env).max_num_seqs == 3


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "q.toml").write_text("[executor]\nfraction = 1\n")
    assert parse(env={"QUARTET_CONFIG": str(tmp_path / "q.toml")}).fraction == 1.0


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--links", "tcp://a:1, tcp://b:2,"], "links", ["tcp://a:1", "tcp://b:2"]),
        (["--links="], "links", []),
        (["--memory", "1.5"], "memory", 1.5),
        (["--memory", "none"], "memory", None),
        (["--fast"], "fast", True),
        (["--fast=false"], "fast", False),
        (["--fast", "true"], "fast", True),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--scheduler-link", "none"], "scheduler_link", "none"),
    ],
)
def test_texts_become_values(flags: list[str], field: str, value: object) -> None:
    assert getattr(parse(*flags), field) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: expected int >= 1, got '0'"),
        (["--max-num-seqs", "2000"], "--max-num-seqs: expected int <= 1024, got '2000'"),
        (["--max-num-seqs", "1.5"], "--max-num-seqs: expected int, got '1.5'"),
        (["--max-num-seqs", "true"], "--max-num-seqs: expected int, got 'true'"),
        (["--fraction", "nan"], "--fraction: "),
        (["--memory", "inf"], "--memory: must be a finite number, got 'inf'"),
        (["--fast", "maybe"], "--fast: expected bool, got 'maybe'"),
        (["--dtype", "int3"], "--dtype: must be one of auto, float32, got 'int3'"),
        (["--max-num-seq", "1"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["extra"], "unknown argument extra"),
        (["--max-num-seqs"], "expected one argument"),
        (["--model", ""], "--model: "),
        (["--fast", "--dtype", "float32"], "fast: not with dtype float32"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(*flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("max_num_seqs = 1", "unknown setting max_num_seqs"),
        ("modle = 'x'", "did you mean model?"),
        ("[executer]\nfast = true", "did you mean executor?"),
        ("[executor]\nmax-num-seqs = 1", "unknown setting executor.max-num-seqs"),
        ("[executor]\nmax_num_seqs = '1'", "executor.max_num_seqs in"),
        ("[executor]\nmax_num_seqs = true", "expected int, got True"),
        ("[executor]\nfraction = nan", "executor.fraction in"),
        ("[executor]\nlinks = 'a,b'", "executor.links in"),
        ("[executor]\nlinks = [1]", "executor.links in"),
        ("[executor]\nscheduler_link = 2020-01-01", "executor.scheduler_link in"),
        ("executor = 1", "executor in"),
        ("executor = [", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_named(toml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(toml=toml, tmp=tmp_path)
    assert message in str(caught.value)
    assert "q.toml" in str(caught.value)


def test_other_sections_are_left_to_their_services(tmp_path: Path) -> None:
    assert parse(toml="[gateway]\nanything = 1\n", tmp=tmp_path, env={"QUARTET_SCHEDULER_LINK": "x"})


@pytest.mark.parametrize("name", ["QUARTET_EXECUTOR_X", "QUARTET_MODLE", "QUARTET_MAX_NUM_SEQS"])
def test_an_unknown_environment_variable_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown environment variable {name}"):
        parse(env={name: "1"})


def test_a_wrong_environment_variable_is_named() -> None:
    with pytest.raises(SettingsError, match="QUARTET_EXECUTOR_MAX_NUM_SEQS: expected int"):
        parse(env={"QUARTET_EXECUTOR_MAX_NUM_SEQS": "many"})


def test_a_missing_file_is_told() -> None:
    with pytest.raises(SettingsError, match="cannot read the settings file /nowhere"):
        parse("--config", "/nowhere")


def test_wrong_settings_exit_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(ExampleSettings, "executor", ["--max-num-seqs", "0"], {})
    assert caught.value.code == 2
    assert capsys.readouterr().err == "quartet executor: --max-num-seqs: expected int >= 1, got '0'\n"


def test_help_tells_limits_defaults_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(ExampleSettings, "executor", ["--help"], {}, description="Runs it.")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Runs it." in text
    assert "rows at 100 % load (>= 1, <= 1024; default: 256; env: QUARTET_EXECUTOR_MAX_NUM_SEQS)" in text
    assert "env: QUARTET_RUN_DIR" in text


def test_load_settings_makes_a_private_run_dir(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "run"
    load_settings(ExampleSettings, "executor", ["--run-dir", str(run_dir)], {})
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_someone_elses_run_dir_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    with pytest.raises(SettingsError, match="belongs to user"):
        prepare_run_dir(str(tmp_path))


def test_the_default_run_dir_leaves_room_for_a_socket_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    assert default_run_dir().startswith("/tmp/quartet-")


def test_one_setting_of_another_service_can_be_read(tmp_path: Path) -> None:
    config = tmp_path / "q.toml"
    config.write_text('[gateway]\ngrpc_address = "file:1"\n')
    env = {"QUARTET_GATEWAY_GRPC_ADDRESS": "env:1"}
    assert peek_setting("gateway", "grpc_address", ["--grpc-address", "flag:1"], env, str(config)) == "flag:1"
    assert peek_setting("gateway", "grpc_address", ["--grpc-address=flag:2"], env, str(config)) == "flag:2"
    assert peek_setting("gateway", "grpc_address", [], env, str(config)) == "env:1"
    assert peek_setting("gateway", "grpc_address", [], {}, str(config)) == "file:1"
    assert peek_setting("gateway", "grpc_address", [], {}, "") == ""
