"""Settings: one typed struct per service, filled from a TOML file, the environment and flags.

Later sources win: defaults, then the file (top level, then the service's section), then the
environment (QUARTET_<FIELD>, then QUARTET_<SECTION>_<FIELD>), then flags. An unknown name or a wrong
value ends the process with exit code 2 and one line that names the setting and where it came from.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import math
import os
import re
import socket
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import msgspec

EXIT_SETTINGS_ERROR = 2
SECTIONS = ("gateway", "tokenizer", "scheduler", "executor", "serve")
# Read elsewhere or by tools around the services, so never an unknown setting.
RESERVED_ENVIRONMENT = frozenset(
    {
        "QUARTET_CONFIG",
        "QUARTET_CACHE_DIR",
        "QUARTET_ADDRESS",
        "QUARTET_API_KEY",
        "QUARTET_TLS_CA",
        "QUARTET_TLS_CERT",
        "QUARTET_TLS_KEY",
    }
)

DEFAULT_MODEL = "smollm2-135m-instruct"


def default_run_dir() -> str:
    """Where services started one by one meet: short, since a socket's path has at most 107 bytes."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) <= 60 and os.path.isdir(runtime):
        return os.path.join(runtime, "quartet")
    return f"/tmp/quartet-{os.getuid()}"


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service has. A service's settings subclass this and add their own fields."""

    model: Annotated[
        str,
        msgspec.Meta(
            description="what to serve: an alias, a .gguf file, a folder with safetensors, or a hub id", min_length=1
        ),
    ] = DEFAULT_MODEL
    run_dir: Annotated[
        str, msgspec.Meta(description="folder of the ipc sockets between services on one host", min_length=1)
    ] = msgspec.field(default_factory=default_run_dir)
    curve_keys: Annotated[
        str,
        msgspec.Meta(description="folder of keys for tcp links, see quartet keys; empty: they are open to everyone"),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], msgspec.Meta(description="the least severe line that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"], msgspec.Meta(description="auto: console on a terminal, json elsewhere")
    ] = "auto"
    name: Annotated[
        str, msgspec.Meta(description="this process's name in logs and to its neighbours; empty: SERVICE-HOST-PID")
    ] = ""
    otlp_endpoint: Annotated[
        str,
        msgspec.Meta(
            description="where OpenTelemetry spans are posted, as http://host:4318; empty: OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
    ] = ""


class SettingsError(ValueError):
    """One line: which setting, where it came from, what is allowed."""


T = TypeVar("T", bound=CommonSettings)


def load_settings(
    settings_type: type[T],
    section: str,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    description: str | None = None,
    epilog: str | None = None,
) -> T:
    """The settings of `section`; exits with code 2 and one line on stderr when they are wrong.

    `--help` and `--version` print and exit with 0. The run_dir exists and is private when this returns.
    """
    environ = os.environ if environ is None else environ
    try:
        settings = parse_settings(settings_type, section, argv, environ, description, epilog)
        if settings.run_dir:
            prepare_run_dir(settings.run_dir)
        if settings.curve_keys:
            check_curve_keys(settings.curve_keys, section)
        return settings
    except SettingsError as error:
        print(f"quartet {section}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_SETTINGS_ERROR) from None


def parse_settings(
    settings_type: type[T],
    section: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    description: str | None = None,
    epilog: str | None = None,
) -> T:
    """`load_settings` that raises SettingsError."""
    fields = {field.name: field for field in msgspec.structs.fields(settings_type)}
    flags = vars(build_parser(settings_type, section, description, epilog).parse_args(list(argv)))
    values: dict[str, Any] = {}

    config = flags.pop("config") or environ.get("QUARTET_CONFIG", "")
    if config:
        for name, value, source in _file_values(config, section, fields):
            values[name] = _convert(value, fields[name].type, source, strict=True)
    for name, value, source in _environment_values(environ, section, fields):
        values[name] = _convert_text(value, fields[name].type, source)
    for name, value in flags.items():
        if value is not None:
            values[name] = _convert_text(value, fields[name].type, _flag(name))
    for name, field in fields.items():
        if field.required and name not in values:
            raise SettingsError(f"{_flag(name)} is required (or {_env_name(section, name)})")
    try:
        return settings_type(**values)
    except (ValueError, TypeError) as error:  # a rule between fields, checked in __post_init__
        raise SettingsError(str(error)) from None


def prepare_run_dir(path: str) -> None:
    """Makes the folder, for its owner only; refuses one of someone else, who could listen in on its sockets."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        owner = os.stat(path).st_uid
    except OSError as error:
        raise SettingsError(f"run_dir: cannot use {path}: {error.strerror or error}") from None
    if owner != os.getuid():
        raise SettingsError(f"run_dir: {path} belongs to user {owner}, not to this process's user {os.getuid()}")


def check_curve_keys(folder: str, section: str) -> None:
    """Refuses keys that the service could not use, before it begins with anything that takes long."""
    from quartet.shared.curve import KeysError, read_binder_keys, read_dialer_keys

    try:
        if section in ("gateway", "scheduler"):
            read_binder_keys(folder)
        elif section in ("tokenizer", "executor"):
            read_dialer_keys(folder)
    except KeysError as error:
        raise SettingsError(str(error)) from None


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """What the first `flag value` or `flag=value` gives; None when there is none."""
    for i, argument in enumerate(argv):
        if argument == flag and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


def peek_setting(
    section: str, name: str, argv: Sequence[str], environ: Mapping[str, str], config: str, default: str = ""
) -> str:
    """One setting of a service as text, without its settings type: for telling where a service is."""
    if (given := flag_value(argv, _flag(name))) is not None:
        return given
    if (value := environ.get(_env_name(section, name))) is not None:
        return value
    try:
        content = tomllib.loads(Path(config).read_text()) if config else {}
    except (OSError, ValueError):
        return default  # the services say what is wrong with the file
    return str(content.get(section, {}).get(name, default))


# --- sources --------------------------------------------------------------------------------------


def _file_values(path: str, section: str, fields: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None

    common = [field.name for field in msgspec.structs.fields(CommonSettings)]
    found: list[tuple[str, Any, str]] = []
    for key, value in content.items():
        if key in SECTIONS:
            if not isinstance(value, dict):
                raise SettingsError(f"{key} in {path} must be a section: [{key}]")
        elif key in common:
            found.append((key, value, f"{key} in {path}"))
        else:
            raise SettingsError(f"unknown setting {key} in {path}{_suggest(key, [*common, *SECTIONS])}")
    for key, value in content.get(section, {}).items():
        if key not in fields:
            raise SettingsError(f"unknown setting {section}.{key} in {path}{_suggest(key, fields)}")
        found.append((key, value, f"{section}.{key} in {path}"))
    return found


def _environment_values(
    environ: Mapping[str, str], section: str, fields: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    common = {_env_name("", field.name): field.name for field in msgspec.structs.fields(CommonSettings)}
    own = {_env_name(section, name): name for name in fields}
    others = tuple(f"QUARTET_{other.upper()}_" for other in SECTIONS if other != section)
    for name in environ:
        known = name in common or name in own or name in RESERVED_ENVIRONMENT or name.startswith(others)
        if name.startswith("QUARTET_") and not known:
            raise SettingsError(f"unknown environment variable {name}{_suggest(name, [*common, *own])}")
    return [(table[name], environ[name], name) for table in (common, own) for name in table if name in environ]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)
        if unknown:
            name = unknown[1].split("=")[0]
            kind = "flag" if name.startswith("-") else "argument"
            message = f"unknown {kind} {name}{_suggest(name, self._option_string_actions)}"
        raise SettingsError(f"{message}; see --help")


def build_parser(
    settings_type: type[CommonSettings], section: str, description: str | None = None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Flags for every field; parsed values are the texts given, None where a flag is absent."""
    parser = _Parser(
        prog=f"quartet {section}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (env: QUARTET_CONFIG)")
    parser.add_argument("--version", action="version", version=f"quartet {version()}")
    common_names = {field.name for field in msgspec.structs.fields(CommonSettings)}
    own = parser.add_argument_group(f"{section} settings")
    common = parser.add_argument_group("common settings")
    for field in msgspec.structs.fields(settings_type):
        is_common = field.name in common_names
        kind, meta = _unwrap(field.type)
        env = _env_name("" if is_common else section, field.name)
        limits = _limits(kind, meta)
        notes = [*([limits] if limits else []), f"default: {_show_default(field)}", f"env: {env}"]
        text = f"{meta.description if meta and meta.description else ''} ({'; '.join(notes)})".lstrip()
        options: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
        (common if is_common else own).add_argument(
            _flag(field.name), dest=field.name, metavar=_metavar(kind), help=text.replace("%", "%%"), **options
        )
    return parser


class SettingText(NamedTuple):
    """A setting for people: what it may be, its limits ("" for none), its default, what it is for."""

    values: str
    limits: str
    default: str
    description: str


def describe_setting(field: msgspec.structs.FieldInfo) -> SettingText:
    kind, meta = _unwrap(field.type)
    values = (
        ", ".join(map(str, typing.get_args(kind))) if typing.get_origin(kind) is Literal else _VALUES[_metavar(kind)]
    )
    description = meta.description if meta is not None and meta.description else ""
    return SettingText(values, _limits(kind, meta), _show_default(field), description)


def default_name(service: str) -> str:
    """Another one for each process that runs: process ids are alike in containers, hosts are not."""
    return f"{service}-{socket.gethostname()}-{os.getpid()}"


def version() -> str:
    try:
        return importlib.metadata.version("quartet")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# --- values ---------------------------------------------------------------------------------------


def _convert(value: Any, kind: Any, source: str, strict: bool) -> Any:
    try:
        converted = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_plain(str(error), kind)}, got {value!r}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise SettingsError(f"{source}: must be a finite number, got {value!r}")
    return converted


def _convert_text(text: str, kind: Any, source: str) -> Any:
    bare, _ = _unwrap(kind)
    options = _options(bare)
    if type(None) in options and str not in options and text.strip().lower() in ("", "none", "null"):
        return None
    if any(typing.get_origin(option) is list for option in options):
        items = [item.strip() for item in text.split(",")]
        return _convert([item for item in items if item], kind, source, strict=False)
    return _convert(text, kind, source, strict=False)


def _unwrap(kind: Any) -> tuple[Any, msgspec.Meta | None]:
    if typing.get_origin(kind) is Annotated:
        bare, *extras = typing.get_args(kind)
        return bare, next((extra for extra in extras if isinstance(extra, msgspec.Meta)), None)
    return kind, None


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _plain(message: str, kind: Any) -> str:
    bare, _ = _unwrap(kind)
    if "Invalid enum value" in message:
        return f"must be one of {', '.join(map(str, typing.get_args(bare)))}"
    return re.sub(r"(, got `\w+`)?( - at `\$.*`)?$", "", message).replace("`", "").replace("Expected", "expected")


def _limits(kind: Any, meta: msgspec.Meta | None) -> str:
    if meta is None or kind in (str, list):
        return ""
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    return ", ".join(f"{sign} {getattr(meta, name)}" for name, sign in signs if getattr(meta, name) is not None)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    options = [option for option in _options(kind) if option is not type(None)]
    if any(typing.get_origin(option) is list for option in options):
        return "A,B,..."
    return {int: "INT", float: "NUMBER", bool: "true|false"}.get(options[0], "TEXT")


_VALUES = {"INT": "integer", "NUMBER": "number", "true|false": "true, false", "TEXT": "text", "A,B,...": "list"}


def _show_default(field: Any) -> str:
    if field.required:
        return "none, required"
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default)) or "empty"
    return "empty" if default == "" else str(default)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _env_name(section: str, name: str) -> str:
    return "_".join(part.upper() for part in ("quartet", section, name) if part)


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
