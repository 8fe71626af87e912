"""docs/settings.md says what the code says; `make lint` checks it by the same tool."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[3]


def load_tool():
    spec = importlib.util.spec_from_file_location("settings_docs", ROOT / "tools" / "generate_settings_docs.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_every_setting_of_every_service_is_in_the_table():
    tool = load_tool()
    text = tool.render()
    for section, kind in tool.SERVICES:
        part = text.split("## Every service")[1].split(f"\n## {'quartet serve' if section == 'serve' else section}\n")
        for field in msgspec.structs.fields(kind):
            assert any(f"| `{field.name}` |" in piece for piece in part), f"{section}.{field.name}"


def test_the_check_finds_a_difference(tmp_path, monkeypatch, capsys):
    tool = load_tool()
    target = tmp_path / "docs" / "settings.md"
    target.parent.mkdir()
    monkeypatch.setattr(tool, "TARGET", target)
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    target.write_text(target.read_text().replace("max_num_seqs", "max_seqs"))
    assert tool.main(["--check"]) == 1
    assert "docs/settings.md is not what the code says" in capsys.readouterr().out


def test_the_table_does_not_depend_on_where_it_is_made(tmp_path):
    code = "import sys; sys.path.insert(0, 'tools'); import generate_settings_docs as t; sys.stdout.write(t.render())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
        ).stdout
        for environ in ({}, {"XDG_RUNTIME_DIR": str(tmp_path)})
    }
    assert len(outputs) == 1
