"""`python -m bench.gpu`: under six minutes on one GPU of H200's class; a JSON object is the last line.

Exit status 0: all checks passed; 1: one did not; 3: there is no GPU, and nothing was measured.

    --toy            on a CPU, under Triton's interpreter, at sizes that mean nothing: to see that it runs
    --wheels FOLDER  wheels of what this Python lacks (see `make gpu-wheels`); nothing is installed
    --section NAME   one section in this process, as JSON
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXIT_NO_GPU = 3
# Seconds that each section may take; what is left of the whole bounds it too.
SECTIONS = {"kernels": 110, "rates": 80, "serving-1b": 75, "serving-1b-eager": 60, "serving-8b": 90}
TOTAL_SECONDS = 350


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split(";")[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--section", choices=SECTIONS)
    arguments = parser.parse_args()
    if arguments.toy:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not has_gpu():
        print(json.dumps({"gpu": None, "measured": False, "reason": "torch finds no GPU: nothing was measured"}))
        return EXIT_NO_GPU
    if arguments.section:
        print(json.dumps(run_section(arguments.section, arguments.toy)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_importable(Path(folder), arguments.wheels)
        return run_all(arguments.toy)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def make_importable(folder: Path, wheels: Path | None) -> None:
    """Puts the project and the wheels' packages on the path of this process and of those it starts."""
    paths = [str(ROOT)]
    if importlib.util.find_spec("quartet") is None:
        (folder / "quartet").mkdir()
        for name in ("shared", "services"):
            (folder / "quartet" / name).symlink_to(ROOT / name)
        paths.append(str(folder))
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / "wheels")
        # Last: what this Python has itself is what is meant to be proved.
        paths.append(str(folder / "wheels"))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_all(is_toy: bool) -> int:
    """Each section in a process of its own, so that one that crashes or hangs is one result."""
    started, results = time.monotonic(), {}
    for name, limit in SECTIONS.items():
        left = TOTAL_SECONDS - (time.monotonic() - started)
        results[name] = run_process(name, is_toy, min(limit, left) if not is_toy else 120)
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    add_bounds(results)
    problems = list(find_problems(results))
    table = {
        "gpu": describe_gpu(),
        "measured": not is_toy,
        "seconds": round(time.monotonic() - started, 1),
        "problems": problems,
        **results,
    }
    print(json.dumps(table))
    return 1 if problems else 0


def run_process(name: str, is_toy: bool, limit: float) -> dict[str, Any]:
    if limit < 10:
        return {"error": "no time left"}
    command = [sys.executable, "-m", "bench.gpu", "--section", name, *(["--toy"] if is_toy else [])]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return {"error": f"not done after {limit:.0f} s"}
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        return {"error": f"exit status {process.returncode}; see above"}
    result: dict[str, Any] = json.loads(lines[-1])
    return {**result, "section_seconds": round(time.monotonic() - started, 1)}


def run_section(name: str, is_toy: bool) -> dict[str, Any]:
    import torch

    from bench.gpu import kernels, rates, serving, toy
    from bench.gpu.shapes import TOY, Sizes

    toy.prepare()
    device = torch.device("cpu") if is_toy else torch.device("cuda", 0)
    sizes = TOY if is_toy else Sizes()
    if name == "kernels":
        return kernels.check_all(sizes, device, is_toy)
    if name == "rates":
        return rates.measure(sizes, device)
    shape = "toy" if is_toy else name.split("-")[1]
    return serving.measure(shape, not name.endswith("eager"), sizes, device, is_toy)


def add_bounds(results: dict[str, dict[str, Any]]) -> None:
    """Decode rates beside what reading weights, keys and values at the measured bandwidth would allow."""
    bandwidth = results["rates"].get("copy_bytes_per_second")
    for result in results.values():
        if bandwidth and "step_bytes" in result:
            bound = result["num_requests"] * bandwidth / result["step_bytes"]
            result["bound_tokens_per_second"] = bound
            result["bound_share"] = result["decode_tokens_per_second"] / bound


def find_problems(results: dict[str, dict[str, Any]]) -> Any:
    """What failed. Rates below their goals are figures to report, not failures."""
    for name, result in results.items():
        if "error" in result:
            yield f"{name}: {result['error']}"
    for name, check in results["kernels"].items():
        if isinstance(check, dict) and not check["passed"]:
            yield f"{name}: error {check['error']}"


def describe_gpu() -> dict[str, Any]:
    import torch

    versions: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        versions |= {"name": properties.name, "memory": properties.total_memory}
    return versions


if __name__ == "__main__":
    sys.exit(main())
