"""Generates shared/pb from proto/. With --check, only compares: exit code 1 when they differ.

The modules are importable as quartet.shared.pb.inference_pb2 only: no top-level `inference` or
`proto`, names that other packages have. The descriptor's own file name stays
inference/v1/inference.proto, as other languages and reflection know it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
OUTPUT_DIR = ROOT / "shared" / "pb"
PROTO = "inference/v1/inference.proto"
# How generated code would import its neighbour, and how it must.
IMPORT = "from inference.v1 import inference_pb2"
OUR_IMPORT = "from quartet.shared.pb import inference_pb2"


def generate() -> dict[str, str]:
    """File name -> content of what belongs in shared/pb."""
    well_known = str(resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        code = protoc.main(["protoc", f"-I{PROTO_DIR}", f"-I{well_known}", *outputs, PROTO])
        if code != 0:
            raise SystemExit(code)
        generated = (Path(folder) / PROTO).parent
        return {path.name: path.read_text().replace(IMPORT, OUR_IMPORT) for path in sorted(generated.iterdir())}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when shared/pb is out of date")
    check = parser.parse_args(argv).check
    differing = []
    for name, content in generate().items():
        path = OUTPUT_DIR / name
        if path.exists() and path.read_text() == content:
            continue
        differing.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(content)
    for path in differing:
        print(f"{path}: {'out of date; run tools/generate_pb.py' if check else 'written'}")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
