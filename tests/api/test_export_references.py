"""Exported files of references, which are Python files with a model, and the command."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import exported_file
import fastconv
from exported_launches import emulate
from exports import SMALL, exported
from fastconv import cli
from fastconv.exporter import ExportError

REFERENCE = '''
import math
import torch
import torch.nn as nn

scale = 3

class Model(nn.Module):
    """Two layers."""

    def __init__(self, channels: int, kernel: int = 3):
        super(Model, self).__init__()
        self.first = nn.Conv2d(channels, channels, kernel, groups=channels, padding=1, bias=True)
        self.second = torch.nn.Conv2d(channels, math.floor(4.5), kernel_size=1)

    def forward(self, x):
        outputs = [self.second(layer(x)) for layer in (self.first,)]
        return outputs[0].relu()

def get_inputs():
    return [torch.rand(2, 8, 10, 12)]

def get_init_inputs():
    return [8]
'''


def _reference(tmp_path: Path, text: str = REFERENCE) -> Path:
    path = tmp_path / "reference.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_references_keep_all_but_their_convolutions(tmp_path: Path) -> None:
    path = tmp_path / "exported.py"
    text = fastconv.export(reference=_reference(tmp_path), output=path)
    assert "class ModelNew(nn.Module):" in text
    assert "self.second = Conv2d(channels, math.floor(4.5), kernel_size=1)" in text
    assert "self_check(ModelNew(8), (2, 8, 10, 12))" in text
    module = exported_file.load(path)
    reference = exported_file.load(tmp_path / "reference.py")
    torch.manual_seed(2)
    model = module.ModelNew(8)
    torch.manual_seed(2)
    expected = reference.Model(8)
    assert list(model.state_dict()) == list(expected.state_dict())
    emulate(module, "sm_90a")
    x = torch.rand(2, 8, 10, 12)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.testing.assert_close(model(x), expected(x))
    # Both convolutions have tuned plans.
    assert {key[2].weight for key in module.TUNED} == {(8, 1, 3, 3), (4, 8, 1, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("math.floor(4.5)", "scale"), "uses scale, which is neither imported nor defined"),
        (("import math", "import numpy as math"), "imports only torch and the standard library"),
        (("padding=1", "padding='same'"), "padding should be numbers of zeros, but got 'same'"),
        (("nn.Conv2d", "nn.Linear"), "constructs no nn.Conv1d, nn.Conv2d,"),
        (("def get_inputs", "def inputs"), "should define get_inputs"),
        (("[torch.rand(2, 8, 10, 12)]", "[1]"), "should return tensors"),
        (("return [8]", "return [torch.tensor(8)]"), "should be numbers, strings"),
        (("class Model", "class Model("), "cannot read"),
        (("2, 8, 10, 12", "2, 7, 10, 12"), "cannot be run: RuntimeError: Given groups=8"),
        (("scale = 3", "import sys; sys.exit(0)"), "cannot be run: it calls sys.exit(0)"),
        (("return [8]", "raise SystemExit('over')"), "cannot be run: it calls sys.exit('over')"),
        (("return [8]", "return None"), "get_init_inputs should return a list, but returns None"),
        (("[self.second(layer(x)) for layer in (self.first,)]", "[x]"), "computes no convolution"),
        (("scale = 3", "raise ValueError"), "cannot be run: ValueError"),
        (("scale = 3", "scale = 3 / 0"), "cannot be run: ZeroDivisionError: division by zero"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_references_that_cannot_be_exported(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    text = REFERENCE.replace(*change)
    if "Linear" in change[1]:
        text = re.sub(r"nn\.Linear\(.*\)", "nn.Identity()", text)
    with pytest.raises(ExportError, match=re.escape(message)):
        fastconv.export(reference=_reference(tmp_path, text))


def test_references_may_print_and_have_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / 'a \\u """ model.py'
    path.write_text(REFERENCE.replace("scale = 3", "print('hello')"), encoding="utf-8")
    assert cli.main(["export", "--reference", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "hello\n"
    assert path.name in (ast.get_docstring(ast.parse(captured.out)) or "")


# --- The command ---------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    assert cli.main(["export", "--workload", "asym5x9", "-o", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == exported("asym5x9").read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""
    options = ["--bare", "--dtype", "float16", "bfloat16"]
    assert cli.main(["export", "--shape", "1x32x64x64 64x32x3x3", *options]) == 0
    printed = capsys.readouterr().out
    assert "class ModelNew(Conv2d):" in printed
    assert 'TUNED["sm_90a", "forward", EXPORTED, "fastconv::bfloat16", "ieee"]' in printed
    assert '"float", "tf32"' not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nothing"], "no workload 'nothing'"),
        (["--shape", "1x2x3"], "malformed shape"),
        (["--shape", "1x4x8x8 4x4x3x3 padding=1,0,1,0"], "nn.Conv2d pads both sides alike"),
        (["--workload", "asym5x9", "--attribute", "2d"], "attribute should be a name"),
        *(
            (["--workload", "asym5x9", "--attribute", name], f"attribute should not be {name!r}")
            for name in ("forward", "train", "training", "_modules", "__class__", "__mine")
        ),
        (["--reference", "missing.py"], "cannot read missing.py"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_one_thing_is_exported() -> None:
    with pytest.raises(ExportError, match="but got workload and shape"):
        fastconv.export("asym5x9", shape=SMALL)
    with pytest.raises(ExportError, match="but got none of them"):
        fastconv.export()
    with pytest.raises(ExportError, match="dtype should be one of"):
        fastconv.export("asym5x9", dtypes=["float64"])
