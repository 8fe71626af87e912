"""The committed code is what the proto says, and is importable under our name only."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from quartet.shared.pb import inference_pb2 as pb

ROOT = Path(__file__).parents[3]


def test_the_committed_code_is_up_to_date():
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_pb.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_other_languages_find_the_file_by_its_path():
    assert pb.DESCRIPTOR.name == "inference/v1/inference.proto" and pb.DESCRIPTOR.package == "inference.v1"


def test_no_top_level_package_is_taken():
    assert "inference" not in sys.modules and importlib.util.find_spec("inference") is None


def test_every_sampling_field_has_presence():
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name


def test_enums_have_an_unspecified_zero():
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
