"""Packages of AOTInductor in a program without Python, and the library that computes there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastconv import cli
from fastconv.problem import ACTIVATIONS
from native import deployed_cases
from native.deployment import (
    Deployed,
    Model,
    compile_source,
    record,
    recording,
    run,
    run_model,
    run_script,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def package(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the model for any batch size."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(
            model, (torch.randn(2, 3, 17, 16),), dynamic_shapes=({0: batch},)
        )
    operators = {str(node.target) for node in program.graph.nodes if "fastconv" in str(node.target)}
    assert operators == {"fastconv.forward.default", "fastconv.fused.default"}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


class TestPackage:
    @pytest.mark.parametrize("batch", [2, 5])
    def test_in_a_program(
        self, deployed: Deployed, package: Path, model: Model, batch: int
    ) -> None:
        images = torch.randn(batch, 3, 17, 16)
        with torch.no_grad():
            expected = model(images)
        output = run_model(deployed, "run", package, images).view_as(expected)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_trace_in_a_program(self, deployed: Deployed, model: Model, tmp_path: Path) -> None:
        images = torch.randn(2, 3, 17, 16)
        with torch.no_grad():
            expected = model(images)
            torch.jit.trace(model, images).save(tmp_path / "model.pt")
        output = run_model(deployed, "trace", tmp_path / "model.pt", images).view_as(expected)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)

    def test_in_python_which_records_its_forms(self, package: Path, model: Model) -> None:
        images = torch.randn(3, 3, 17, 16)
        loaded = torch._inductor.aoti_load_package(str(package))
        with torch.no_grad():
            torch.testing.assert_close(loaded(images), model(images), rtol=1e-4, atol=1e-4)
        forms = record(loaded, images, images)
        assert [form.operator for form in forms] == ["forward", "forward", "fused", "forward"]
        assert forms[0].shapes == ((3, 3, 17, 16), (8, 3, 3, 5), (8,))

    def test_an_error_of_the_library_is_printed(
        self, deployed: Deployed, package: Path, tmp_path: Path
    ) -> None:
        (given := tmp_path / "input").write_bytes(bytes(4 * 3 * 17 * 16))
        arguments = (package, "cpu", given, tmp_path / "output", 1, 3, 17, 16)
        ended = deployed.run("run", *arguments, FASTCONV_BUNDLE=str(given))
        assert ended.returncode == 1
        assert f"{given} is no bundle" in ended.stderr


class TestLibrary:
    def test_the_program_on_the_page_compiles(self, deployed: Deployed, tmp_path: Path) -> None:
        page = Path(__file__).parents[2] / "docs/deployment.md"
        (program,) = re.findall(r"^```cpp\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        (source := tmp_path / "main.cc").write_text(program)
        compile_source(source, deployed.library.parent, "-fsyntax-only")

    @pytest.mark.parametrize("seed", [0, 1])
    def test_computes_what_pytorch_does_in_float64(self, deployed: Deployed, seed: int) -> None:
        assert run_script("deployed_cases.py", deployed.library, seed).stdout == "60\n"

    def test_all_activations_are_compared(self) -> None:
        assert tuple(deployed_cases.ACTIVATIONS) == ACTIVATIONS

    def test_batch_normalization_names_itself(self, deployed: Deployed) -> None:
        program = (
            f"import torch\ntorch.ops.load_library({str(deployed.library)!r})\n"
            "x, rest = torch.randn(2, 3, 4), (True, 0.1, 1e-5, 'relu', 0.0)\n"
            "torch.ops.fastconv.batch_norm_forward(x, *6 * (None,), *rest)"
        )
        ended = run(sys.executable, "-c", program)
        assert "does not compute fastconv::batch_norm_forward: export" in ended.stderr

    def test_after_python_it_serves_nothing(self, deployed: Deployed) -> None:
        """Python's fastconv goes on to serve calls in a process that loads the library later."""
        program = (
            "import torch, fastconv\n"
            f"torch.ops.load_library({str(deployed.library)!r})\n"
            "x = torch.randn(1, 2, 5, 5, requires_grad=True)\n"
            "print(fastconv.conv2d(x, torch.randn(3, 2, 3, 3), activation='relu').grad_fn is None)"
        )
        ended = run(sys.executable, "-c", program, PYTHONPATH=_path())
        assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr

    def test_python_after_it_is_an_error(self, deployed: Deployed) -> None:
        program = (
            f"import torch\ntorch.ops.load_library({str(deployed.library)!r})\nimport fastconv\n"
        )
        ended = run(sys.executable, "-c", program, PYTHONPATH=_path())
        assert ended.returncode == 1
        assert "ImportError: libfastconv.so" in ended.stderr
        assert "import fastconv before" in ended.stderr

    def test_is_not_linked_with_python(self, deployed: Deployed) -> None:
        needed = run("readelf", "-d", deployed.library).stdout
        assert "libtorch_cpu.so" in needed
        assert "python" not in needed


def _path() -> str:
    return ":".join(filter(None, sys.path))


class TestCommand:
    def test_bundle_of_a_package_on_a_cpu(
        self, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It needs none. A file that is no package, and too few inputs, are errors."""
        right, wrong = tmp_path / "right.pt", tmp_path / "wrong.pt"
        torch.save((torch.randn(2, 3, 17, 16),), right)
        torch.save((), wrong)
        for given, inputs, words in (
            (package, right, "and 4 of its forms on a CPU, where they need no bundle"),
            (package, wrong, f"calling the package {package} failed"),
            (right, right, f"cannot load the package {right}"),
        ):
            output = tmp_path / "model.fastconv"
            with recording():
                command = ["bundle", given, "--inputs", inputs, "-o", output]
                assert cli.main([str(part) for part in command]) == 2
            assert words in capsys.readouterr().err
            assert not output.exists()

    def test_build(
        self, deployed: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "new"
        assert cli.main(["build", "--deploy", str(folder), "--json"]) == 0
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert said["library"] == str(folder / "libfastconv.so")
        assert said["built"] is False
        assert sorted(path.name for path in folder.iterdir()) == ["fastconv.h", "libfastconv.so"]
        assert (folder / "libfastconv.so").read_bytes() == deployed.library.read_bytes()

    def test_folder_that_cannot_be_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        assert cli.main(["build", "--deploy", str(tmp_path / "file")]) == 2
        assert "it is not a folder" in capsys.readouterr().err
