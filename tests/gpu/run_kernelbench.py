"""Runs KernelBench's own evaluation on exported files, and writes down what it reports.

    git clone https://github.com/ScalingIntelligence/KernelBench
    PYTHONPATH=src python tests/gpu/run_kernelbench.py KernelBench /tmp/kernelbench

For each of its convolutions of one and two dimensions, ``fastconv export --reference`` turns the
problem's file into one with our kernels. KernelBench's static checker and
``eval_kernel_against_ref``, both unmodified, judge it in float32 and in PyTorch's default
precision, TF32. Files are compiled beforehand, many at a time. Two of KernelBench's modules import
packages that its evaluation does not use: where these are missing, empty modules replace them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

import fastconv

PROBLEMS = (
    62, 63, 80, 56, 50, 82, 83, 84, 85, 86, 87,
    67, 76, 64, 74, 79, 57, 65, 69, 71, 75, 78, 81,
    54, 59, 60, 66, 58, 61, 68, 70, 72, 73, 77,
)  # fmt: skip
CORRECTNESS_TRIALS = 5
TIMING_TRIALS = 20
UNUSED = ("dotenv", "openai", "litellm", "tqdm", "requests", "pydantic", "datasets")

COMPILE = """
import torch
names = {{}}
exec(open({reference!r}).read(), names)
exec(open({exported!r}).read(), names)
with torch.no_grad(), torch.device("cuda"):
    names["ModelNew"](*names["get_init_inputs"]())(*names["get_inputs"]())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernelbench", type=Path, help="a checkout of KernelBench")
    parser.add_argument("output", type=Path, help="writes OUTPUT.md and OUTPUT.json")
    parser.add_argument("--problem", type=int, nargs="+", default=PROBLEMS)
    parser.add_argument(
        "--on-gpu", action="store_true",
        help="make inputs and parameters on the GPU: drawing billions of numbers on a CPU is most "
        "of what the evaluation takes",
    )  # fmt: skip
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.kernelbench / "src"))
    _fill_in()
    evaluation = importlib.import_module("kernelbench.eval")
    checker = importlib.import_module("kernelbench.kernel_static_checker")
    folder = arguments.output.parent / "exported"
    folder.mkdir(parents=True, exist_ok=True)
    problems = {
        number: next((arguments.kernelbench / "KernelBench/level1").glob(f"{number}_*.py"))
        for number in arguments.problem
    }
    start = time.perf_counter()
    compile_all(problems, folder)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.on_gpu:
        torch.set_default_device("cuda")
    rows = []
    for number, path in problems.items():
        rows.append(evaluate(number, path, folder / f"{number}.py", evaluation, checker))
        print(json.dumps(rows[-1]), flush=True)
        write(rows, arguments.output, arguments.kernelbench)


def _fill_in() -> None:
    """Replaces missing modules by empty ones with the few names that are imported from them."""
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            module: Any = types.ModuleType(name)
            module.load_dotenv = module.OpenAI = module.completion = module.tqdm = _nothing
            module.BaseModel = _Record
            sys.modules[name] = module


def _nothing(*arguments: Any, **named: Any) -> None:
    return None


class _Record:
    """Takes attributes as keyword arguments, with the class's attributes as defaults."""

    def __init__(self, **values: Any) -> None:
        for name in self.__annotations__:
            setattr(self, name, values.get(name, getattr(type(self), name)))


def compile_all(problems: dict[int, Path], folder: Path) -> None:
    """Writes all files, and compiles each in its own process."""
    processes = []
    for number, path in problems.items():
        exported = folder / f"{number}.py"
        fastconv.export(reference=path, output=exported)
        code = COMPILE.format(reference=str(path), exported=str(exported))
        processes.append((number, subprocess.Popen([sys.executable, "-c", code])))
    for number, process in processes:
        if process.wait() != 0:
            print(f"problem {number}: compiling failed", flush=True)


def evaluate(
    number: int, path: Path, exported: Path, evaluation: Any, checker: Any
) -> dict[str, Any]:
    text = exported.read_text(encoding="utf-8")
    everything = [
        name for name in checker.CHECK_FUNCTIONS if not name.endswith("_impl") or "cuda" in name
    ]
    valid, errors, _ = checker.validate_kernel_static(
        text, backend="cuda", precision="fp32", forbidden=everything, warnings=[]
    )
    start = time.perf_counter()
    result = evaluation.eval_kernel_against_ref(
        path.read_text(encoding="utf-8"),
        text,
        num_correct_trials=CORRECTNESS_TRIALS,
        num_perf_trials=TIMING_TRIALS,
        measure_performance=True,
        timing_method="cuda_event",
        device=torch.device("cuda:0"),
        backend="cuda",
        precision=torch.float32,
    )
    if result is None:
        raise SystemExit(f"problem {number}: KernelBench found a locked cache; run it again")
    return {
        "problem": number,
        "name": path.stem.partition("_")[2].strip("_"),
        "static_check": "passed" if valid else "; ".join(errors),
        "compiled": result.compiled,
        "correct": result.correctness,
        "trials": result.metadata.get("correctness_trials", ""),
        "reference_ms": result.ref_runtime,
        "exported_ms": result.runtime,
        "speedup": result.ref_runtime / result.runtime if result.runtime > 0 else None,
        "metadata": {key: str(value) for key, value in result.metadata.items()},
        "seconds": time.perf_counter() - start,
    }


def write(rows: list[dict[str, Any]], output: Path, kernelbench: Path) -> None:
    head = ("git", "-C", str(kernelbench), "rev-parse", "--short=12", "HEAD")
    done = subprocess.run(head, capture_output=True, text=True)
    # A checkout without its history may lie inside another repository, whose commit is unrelated.
    commit = os.environ.get("KERNELBENCH_COMMIT") or done.stdout.strip() or "unknown"
    environment = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "kernelbench": commit,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }
    output.with_suffix(".json").write_text(
        json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    lines = [
        "# KernelBench, level 1: exported files",
        "",
        f"{environment['gpu']}, PyTorch {environment['torch']}, float32 in PyTorch's default "
        f"precision. Reported by KernelBench's own static checker (all checks strict) and "
        f"`eval_kernel_against_ref` (commit {commit}), {CORRECTNESS_TRIALS} trials of "
        f"correctness, {TIMING_TRIALS} of time, on files that `fastconv export --reference` made. "
        "Its reference is PyTorch without `cudnn.benchmark`.",
        "",
        "| problem | | static check | correct | PyTorch, ms | exported, ms | speed-up |",
        "| ---: | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        # KernelBench measures no time of incorrect results.
        exported, speedup = "-", "-"
        if row["speedup"]:
            exported, speedup = f"{row['exported_ms']:.3f}", f"{row['speedup']:.2f}x"
        lines.append(
            f"| {row['problem']} | {row['name']} | {row['static_check']} | "
            f"{'yes' if row['correct'] else 'no'} {row['trials']} | {row['reference_ms']:.3f} | "
            f"{exported} | {speedup} |"
        )
    output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
