"""docs/wire.md says what the code does: tables against the structs, example frames against the codec,
and the example request against the real scheduler core."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from quartet.services.scheduler.core import SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared import handshake, link, messages, sampling_params, transport
from quartet.shared.block_hash import block_hash, hash_root, pack_token_ids
from quartet.shared.messages import (
    Finish,
    Granted,
    Message,
    ModelInfo,
    NewRequest,
    Release,
    StepPlan,
    StepResult,
    TextPrompt,
)

DOC = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()

SCALARS = {int: "int", float: "float", bool: "bool", str: "str", bytes: "bin"}


def wire_type(annotation: Any) -> str:
    """A field's type in the document's notation."""
    if annotation in SCALARS:
        return SCALARS[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation == messages.Prompt:
        return "Prompt"
    if origin in (types.UnionType, typing.Union):
        known = [wire_type(arg) for arg in args if arg is not types.NoneType]
        return " \\| ".join(known) + ("?" if types.NoneType in args else "")
    if origin is list:
        return f"[{wire_type(args[0])}]"
    if origin is dict:
        return f"{{{wire_type(args[0])}: {wire_type(args[1])}}}"
    if origin is tuple:
        return f"({', '.join(wire_type(arg) for arg in args)})"
    return str(annotation.__name__)


def wire_default(field: msgspec.structs.FieldInfo) -> str:
    """Empty for a field that must be there."""
    if field.required:
        return ""
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return {"None": "nil", "True": "true", "False": "false", "": '""'}.get(str(value), str(value))


def structs() -> list[type[msgspec.Struct]]:
    """Everything that travels."""
    bases = (messages.Message, messages.Record)
    found = [s for s in vars(messages).values() if inspect.isclass(s) and issubclass(s, bases) and s not in bases]
    parameters = [s for s in vars(sampling_params).values() if inspect.isclass(s) and issubclass(s, msgspec.Struct)]
    return [*found, *(s for s in parameters if s is not sampling_params.RequestLimits)]


class Section(NamedTuple):
    tag: str
    rows: list[list[str]]


def sections() -> dict[str, Section]:
    """The document's tables of fields, by struct."""
    found: dict[str, Section] = {}
    for match in re.finditer(r"^#### (\w+)(?: · tag (\d+))?\n(.*?)(?=^#|\Z)", DOC, re.M | re.S):
        name, tag, body = match.groups()
        lines = [line for line in body.splitlines() if re.match(r"\| \d", line)]
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        assert name not in found, f"{name} is told twice"
        found[name] = Section(tag or "", rows)
    return found


SECTIONS = sections()


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_every_field_is_in_the_document_with_its_place_type_and_default(struct: type[msgspec.Struct]) -> None:
    section = SECTIONS[struct.__name__]
    tag = struct.__struct_config__.tag
    assert section.tag == ("" if tag is None else str(tag))
    hints = typing.get_type_hints(struct)
    first = 0 if tag is None else 1
    expected = [
        [str(place), f"`{field.name}`", wire_type(hints[field.name]), wire_default(field)]
        for place, field in enumerate(msgspec.structs.fields(struct), first)
    ]
    assert [row[:4] for row in section.rows] == expected
    assert all(len(row) == 5 and row[4] for row in section.rows), "every field has its meaning"


def test_the_document_tells_of_nothing_that_is_not_there() -> None:
    assert set(SECTIONS) == {struct.__name__ for struct in structs()}


def test_the_protocol_is_all_that_is_defined() -> None:
    tagged = {s for s in structs() if issubclass(s, Message)}
    assert tagged == set(typing.get_args(messages.AnyMessage))


def test_enumerations() -> None:
    defined = [*vars(messages).values(), *vars(sampling_params).values()]
    enums = [e for e in defined if inspect.isclass(e) and issubclass(e, enum.IntEnum)]
    for kind in enums:
        values = ", ".join(f"{value.value} {value.name}" for value in kind)
        assert f"| `{kind.__name__}` | {values} |" in DOC


MODULES = [messages, link, transport, handshake]


@pytest.mark.parametrize("module", MODULES)
def test_constants(module: types.ModuleType) -> None:
    told = dict(re.findall(r"^\| ([A-Z_]+) \| (\S+) \|", DOC, re.M))
    assert len(told) == 12
    known = {name: value for name, value in vars(module).items() if name in told}
    assert known
    assert {name: str(value) for name, value in known.items()} == {name: told[name] for name in known}
    assert all(any(hasattr(m, name) for m in MODULES) for name in told)


def test_bounds_of_a_model() -> None:
    powers = {1: "1", 2**16: "2¹⁶", 2**23: "2²³", 2**31 - 1: "2³¹ − 1"}
    meanings = {row[1]: row[4] for row in SECTIONS["ModelInfo"].rows}
    for name, (least, most) in handshake._LIMITS.items():
        assert meanings[f"`{name}`"].endswith(f"; from {powers[least]} … {powers[most]}")


# --- example frames -------------------------------------------------------------------------------


class Frame(NamedTuple):
    """`remark` is set for a frame that says the same as the plain one of its message before it."""

    name: str
    remark: str
    told: Any
    payload: bytes


def frames(text: str) -> Iterator[Frame]:
    for block in re.findall(r"^```frame\n(.*?)^```", text, re.M | re.S):
        head, *lines = block.splitlines()
        name, _, remark = head.partition(" ")
        array = " ".join(line for line in lines if not line.startswith("  "))
        for json, python in ((r"h'([0-9a-f]*)'", r"bytes.fromhex('\1')"), ("null", "None")):
            array = re.sub(json, python, array)
        array = re.sub(r"bytes.fromhex\('([0-9a-f]*)'\)", lambda m: repr(bytes.fromhex(m[1])), array)
        array = array.replace("true", "True").replace("false", "False")
        payload = bytes.fromhex("".join(line for line in lines if line.startswith("  ")))
        yield Frame(name, remark, ast.literal_eval(array), payload)


FRAMES = list(frames(DOC))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: f"{frame.name}{frame.remark}")
def test_example_frames(frame: Frame) -> None:
    message = messages.decode(frame.payload)
    assert type(message).__name__ == frame.name
    assert msgspec.msgpack.decode(frame.payload) == frame.told
    if frame.remark:
        plain = next(f for f in FRAMES if f.name == frame.name and not f.remark)
        assert frame.payload != plain.payload and message == messages.decode(plain.payload)
    else:
        assert messages.encode(message) == frame.payload


def test_every_kind_of_frame_has_an_example() -> None:
    assert len(FRAMES) > 20
    assert {"Hello", "Heartbeat", "Submit", "Deltas", "NewRequest", "Outputs", "Granted", "StepPlan", "StepResult"} <= {
        frame.name for frame in FRAMES
    }


def test_what_is_dropped_as_the_document_says() -> None:
    encode = msgspec.msgpack.encode
    whole: list[Any] = [4, 17, 2, True, False]
    assert messages.decode(encode(whole)) == messages.Heartbeat(17, 2, True)
    dropped: list[Any] = [
        [200, 1],  # an unknown tag
        whole[:3],  # a field without default is missing
        [4, 17, 2, 1],  # a wrong type
        [4, 17, 2, True, None],  # nil is no default
        [4, 17.0, 2, True],
        [2, b"reason"],
        [1, 1, 1, 9, "name", 1],  # an unknown enumeration value
        {"progress": 1},
        [],
    ]
    for payload in [*map(encode, dropped), encode(whole) + b"\xc0", encode(whole)[:-1], b""]:
        with pytest.raises(msgspec.DecodeError):
            messages.decode(payload)
    # Records too may be cut at the end or grow there; pairs may not.
    assert messages.decode(encode([22, 1, [1, "x"]])) == messages.Encode(1, TextPrompt("x"))
    assert messages.decode(encode([22, 1, [1, "x", True, "new"]])) == messages.Encode(1, TextPrompt("x"))
    with pytest.raises(msgspec.DecodeError):
        messages.decode(encode([83, 1, 1, b"", None, [], [[1, "x", 2]]]))
    assert messages.decode(encode([11, 2**64 - 1, 1])) == Release(2**64 - 1, 1)


# --- block hashes ---------------------------------------------------------------------------------


def test_hash_vectors() -> None:
    told = dict(re.findall(r"^\| (.+?) \| `([0-9a-f]{64})` \|$", DOC, re.M))
    plain, salted = hash_root(), hash_root([("cache_salt", "s1")])
    first = block_hash(salted, pack_token_ids([5, 6, 7, 8]))
    assert list(told.values()) == [
        plain.hex(),
        block_hash(plain, pack_token_ids([5, 6, 7, 8])).hex(),
        salted.hex(),
        first.hex(),
        block_hash(first, pack_token_ids([9, 11, 12, 13])).hex(),
    ]


# --- the example request --------------------------------------------------------------------------


def test_the_example_request_is_what_the_scheduler_does(tmp_path: Path) -> None:
    core = SchedulerCore(SchedulerSettings(run_dir=str(tmp_path)), 0x1122334455667788, lambda: 0.0)
    core.owner_up("tokenizer")
    said = [message for _, message in core.executor_up(ModelInfo("tiny", "f", 64, 32, 8, 4, 4, 16, "float32", "cpu"))]
    for frame in frames(DOC[DOC.index("## 9. A request on the line") : DOC.index("## 10. Watching")]):
        message = messages.decode(frame.payload)
        match message:
            case Granted():
                effects = core.granted(message)
            case NewRequest():
                effects = core.new_request("tokenizer", message)
            case StepResult():
                effects = core.step_result(message)
            case Finish():
                effects = core.finish(message)
            case Release():
                effects = core.release(message)
            case _:
                assert said and messages.encode(said.pop(0)) == frame.payload, f"the scheduler does not say {message}"
                continue
        assert not said, f"the scheduler says {said}, and then comes {message}"
        said = [m for _, m in [*effects, *core.schedule()]]
    assert not said, f"the scheduler says {said} at the end"


def test_an_executor_takes_the_plans_of_the_example() -> None:
    input_batch = pytest.importorskip("quartet.services.executor.input_batch")
    numpy = pytest.importorskip("numpy")
    batch = input_batch.InputBatch(
        max_num_seqs=4, max_model_len=32, max_num_batched_tokens=16, num_blocks=8, block_size=4, vocab_size=64
    )
    example = [messages.decode(frame.payload) for frame in frames(DOC[DOC.index("## 9. A request on the line") :])]
    results = {message.step_id: message for message in example if isinstance(message, StepResult)}
    plans = [message for message in example if isinstance(message, StepPlan)]
    assert [plan.step_id for plan in plans] == list(range(len(plans))) and set(results) == set(range(len(plans)))
    for plan in plans:
        step = batch.apply(plan)
        rows = step.sampled_rows
        token_ids = numpy.frombuffer(results[plan.step_id].token_ids, "<u4").astype(numpy.int64)
        assert len(rows) == len(token_ids)
        batch.expect_sampled(rows)
        batch.store_sampled(rows, batch.num_tokens[rows] - 1, token_ids, numpy.zeros(len(rows), bool))
