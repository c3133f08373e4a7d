"""Bundles: what Python writes, the library for programs without Python reads and launches."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import fastconv
from fastconv import cli
from fastconv.errors import ExportError
from fastconv.exporter import bundle_file, bundles
from fastconv.exporter.bundles import Form
from fastconv.jit import driver, maps
from fastconv.kernels.family import Gpu, Launch
from fastconv.kernels.gpus import GPUS, H200
from native import deployment
from native.deployment import Deployed, record, run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

HEADER = struct.Struct("<16s3q")
GEOMETRY: Any = ([1, 1], [1, 1, 1, 1], [1, 1], 1, "ieee")


class Case(NamedTuple):
    """A call of an operator."""

    operator: str
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return getattr(torch.ops.fastconv, self.operator)(*self.arguments)


def _half(*shape: int) -> Tensor:
    return torch.randn(shape).half().to(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    grad, x, w = torch.randn(2, 32, 8, 8), torch.randn(2, 32, 8, 8), torch.randn(32, 32, 3, 3)
    fused = map(torch.randn, ((2, 6, 9, 9), (4, 6, 3, 3), (4,), (2, 4, 9, 9)))
    small, taps = _half(2, 16, 8, 8), _half(16, 16, 1, 1)
    return {
        # On Hopper, these have a launch that packs the weight, and both kinds of tensor maps.
        "forward": Case("forward", (_half(2, 64, 16, 16), _half(64, 64, 3, 3), None, *GEOMETRY)),
        "tiled": Case("forward", (small, taps, None, [1, 1], [0] * 4, *GEOMETRY[2:])),
        "im2col": Case("forward", (small, taps, None, [2, 2], [0] * 4, *GEOMETRY[2:])),
        "fused": Case("fused", (*fused, *GEOMETRY, "leaky_relu", 0.25)),
        "input_grad": Case("input_grad", (grad, w, [8, 8], *GEOMETRY)),
        "weight_grad": Case("weight_grad", (grad, x, [3, 3], *GEOMETRY, True)),
    }


@pytest.fixture(scope="module")
def forms(cases: dict[str, Case]) -> dict[str, Form]:
    """The form of each case: CPU tensors', which are planned for a GPU all the same."""
    return {name: record(case, ())[0] for name, case in cases.items()}


@pytest.fixture(scope="module")
def path(forms: dict[str, Form], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "model.fastconv"
    path.write_bytes(deployment.compose(list(forms.values()), [H200, GPUS["sm_80"]]))
    return path


class Calls:
    """Calls operators in a process without fastconv, whose driver logs."""

    def __init__(self, deployed: Deployed, logging_driver: Path, folder: Path) -> None:
        self._paths, self._file = (deployed.library, logging_driver), folder / "calls.pt"

    def __call__(
        self, cases: list[Case], **environment: str
    ) -> list[tuple[dict[str, Any], list[str]]]:
        """What each call returned, and the lines that the driver wrote in it."""
        torch.save([(case.operator, list(case.arguments)) for case in cases], self._file)
        ended = run_script("deployed_calls.py", *self._paths, self._file, **environment)
        answers = [json.loads(line) for line in ended.stdout.splitlines()]
        _, *logs = ended.stderr.split("call\n")
        return list(zip(answers, [log.splitlines() for log in logs], strict=True))


@pytest.fixture
def calls(deployed: Deployed, logging_driver: Path, tmp_path: Path) -> Calls:
    return Calls(deployed, logging_driver, tmp_path)


def _expected(launch: Launch, addresses: dict[str, int]) -> list[str]:
    """The words of the driver's line for a launch."""
    words = [
        *(["early"] if launch.early else []), "launch", launch.kernel.entry,
        ",".join(map(str, launch.grid)), str(launch.block), str(launch.shared_bytes),
    ]  # fmt: skip
    for argument in launch.arguments:
        if isinstance(argument, str):
            words.append(f"p,{addresses.get(argument, 'scratch')}")
        elif isinstance(argument, int):
            words.append(f"i,{argument}")
        else:
            address = addresses.get(argument.tensor, "scratch")
            words.append(f"m,{_map_words(argument)},{address}")
    return words


def _seen(line: str, addresses: dict[str, int], encoded: list[str]) -> list[str]:
    """The words of a line, with tensor maps spelled out, and "scratch" for other addresses."""
    words = []
    for word in line.split(" "):
        kind, *numbers = word.split(",")
        if kind in ("p", "m"):
            known = numbers[-1] in map(str, addresses.values())
            of_map = [encoded[int(numbers[0]) - 1]] if kind == "m" else []
            words.append(",".join([kind, *of_map, numbers[-1] if known else "scratch"]))
        else:
            words.append(word)
    return words


def _map_words(of: Any) -> str:
    made = maps.parameters(of, driver.bindings())
    lists = {
        "sizes": made.sizes, "strides": made.strides, "element": made.element_strides,
        "box": made.box, "lower": made.lower, "upper": made.upper,
    }  # fmt: skip
    words = [f"{int(made.has_corners)} {made.type} {made.swizzle} {made.promotion}"]
    words += [",".join([name, *map(str, values)]) for name, values in lists.items()]
    return " ".join(words)


def _names(form: Form, answer: dict[str, Any]) -> dict[str, int]:
    """The addresses of a call's tensors by their names in launches, without the workspace."""
    if form.operator == "weight_grad":
        names = ("grad_output", "input", "output", "bias_grad")
        return dict(zip(names, answer["tensors"][:2] + answer["results"], strict=True))
    tensors = answer["tensors"] + [0, 0]
    return {
        "input": tensors[0], "weight": tensors[1],
        "bias": tensors[2] if form.operator in ("forward", "fused") else 0,
        "residual": tensors[3] if form.operator == "fused" else 0,
        "output": answer["results"][0],
    }  # fmt: skip


def test_batch_normalization_is_refused() -> None:
    """In training it is an operator of its own; in evaluation, part of a convolution."""
    layer, images = fastconv.ConvBNAct2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with pytest.raises(ExportError, match="fastconv::batch_norm_forward cannot be bundled"):
        record(layer, images)
    with torch.no_grad():
        assert [form.operator for form in record(layer.eval(), images)] == ["fused"]


class TestLaunching:
    def test_launches_are_those_planned(
        self, calls: Calls, cases: dict[str, Case], forms: dict[str, Form], path: Path
    ) -> None:
        done = calls(list(cases.values()), FASTCONV_BUNDLE=str(path))
        encoded: list[str] = []
        kinds = set()
        for form, (answer, log) in zip(forms.values(), done, strict=True):
            assert "error" not in answer, answer
            encoded += [line.split(" ", 2)[2] for line in log if line.startswith("map ")]
            launched = [line for line in log if "launch " in line]
            addresses = _names(form, answer)
            planned = bundles._planned(form, H200)
            expected = [_expected(launch, addresses) for launch in planned.launches]
            assert [_seen(line, addresses, encoded) for line in launched] == expected
            kinds |= {type(a).__name__ for one in planned.launches for a in one.arguments}
            shape = torch.empty(planned.entry.shape)
            if planned.entry.channels_last:
                shape = shape.to(memory_format=torch.channels_last)
            assert answer["strides"][0] == list(shape.stride())
        assert kinds == {"str", "int", "TensorMap", "Im2colMap"}

    def test_kernels_are_loaded_once_and_allowed_shared_memory(
        self, calls: Calls, cases: dict[str, Case], forms: dict[str, Form], path: Path
    ) -> None:
        one = cases["forward"]
        (_, first), (_, second) = calls([one, one], FASTCONV_BUNDLE=str(path))
        launches = bundles._planned(forms["forward"], H200).launches
        assert sum(line == "module" for line in first) == len({x.kernel.text for x in launches})
        assert all("launch " in line for line in second)
        large = {(x.kernel.entry, x.shared_bytes) for x in launches if x.shared_bytes > 48 * 1024}
        assert large
        allowed = {line for line in first if line.startswith("attribute ")}
        assert allowed == {f"attribute {entry} 8 {bytes}" for entry, bytes in large}

    def test_a_thread_without_context_enters_it(
        self, calls: Calls, cases: dict[str, Case], path: Path
    ) -> None:
        invalid_context = {"FASTCONV_BUNDLE": str(path), "LOGGED_STATUS": "201"}
        ((answer, log),) = calls([cases["fused"]], **invalid_context)
        assert "error" not in answer
        assert "context" in log

    def test_failed_launch(self, calls: Calls, cases: dict[str, Case], path: Path) -> None:
        ((answer, _),) = calls([cases["fused"]], FASTCONV_BUNDLE=str(path), LOGGED_STATUS="719")
        assert "on cuda:0: CUDA error 719, logged" in answer["error"]

    def test_another_gpu(self, calls: Calls, cases: dict[str, Case], path: Path) -> None:
        ((answer, log),) = calls([cases["fused"]], FASTCONV_BUNDLE=f":{path}", LOGGED_GPU="9 0 114")
        assert "is planned for sm_90 with 132 SMs, sm_80 with 108 SMs" in answer["error"] or (
            "is planned for sm_80 with 108 SMs, sm_90 with 132 SMs" in answer["error"]
        )
        assert "cuda:0 is sm_90 with 114 SMs" in answer["error"]
        assert str(path) in answer["error"]
        assert not log

    def test_the_second_gpu_of_a_bundle(
        self, calls: Calls, cases: dict[str, Case], forms: dict[str, Form], path: Path
    ) -> None:
        ((_, log),) = calls([cases["forward"]], FASTCONV_BUNDLE=str(path), LOGGED_GPU="8 0 108")
        entries = [line.split()[1] for line in log if line.startswith("launch ")]
        launches = bundles._planned(forms["forward"], GPUS["sm_80"]).launches
        assert entries == [launch.kernel.entry for launch in launches]

    def test_other_forms_are_computed_on_a_cpu(
        self, calls: Calls, cases: dict[str, Case], path: Path
    ) -> None:
        """One more element in the batch, another precision or alignment is another form."""
        x, w, *rest = cases["fused"].arguments
        others = [
            Case("fused", (torch.cat([x, x]), w, rest[0], None, *rest[2:])),
            Case("fused", (x, w, *rest[:-3], "tf32", *rest[-2:])),
            Case("fused", (x, w, *rest[:-1], 0.5)),
        ]
        for answer, log in calls(others, FASTCONV_BUNDLE=str(path)):
            assert "error" not in answer
            assert not log


class TestReading:
    def _read(self, deployed: Deployed, *paths: Path) -> list[str]:
        ended = deployed.run("read", *paths)
        assert ended.returncode == 0, ended.stderr
        lines = ended.stdout.splitlines()
        return [line.split(": ", 1)[1] for line in lines if line.startswith(str(paths[0].parent))]

    @pytest.fixture
    def contents(self, path: Path) -> bytes:
        return path.read_bytes()

    def test_whole_bundle(self, deployed: Deployed, path: Path) -> None:
        assert self._read(deployed, path) == ["read"]

    def test_files_that_are_none(self, deployed: Deployed, contents: bytes, tmp_path: Path) -> None:
        title, _, size, checksum = HEADER.unpack_from(contents)
        rest = contents[HEADER.size :]
        other = rest.replace(fastconv.__version__.encode(), b"9" * len(fastconv.__version__), 1)
        wrong = {
            "is no bundle": b"something else",
            "it ends early": title,
            "has format 7, and this library reads format 3": HEADER.pack(title, 7, size, checksum)
            + rest,
            f"is truncated: {size - 9} of {size} bytes": contents[:-9],
            "is damaged: it does not match its checksum": contents[:-9] + b"\1" + contents[-8:],
            "was made by fastconv 999": _bundle(other),
            "something follows its end": _bundle(rest + bytes(8)),
            "a number is out of range": _bundle(rest[:-16] + b"\xff" * 16),
        }
        paths = [tmp_path / str(number) for number in range(len(wrong))]
        for path, bytes_ in zip(paths, wrong.values(), strict=True):
            path.write_bytes(bytes_)
        paths.append(tmp_path / "missing")
        for words, said in zip([*wrong, "No such file"], self._read(deployed, *paths), strict=True):
            assert words in said

    def test_no_forged_file_crashes(
        self, deployed: Deployed, contents: bytes, tmp_path: Path
    ) -> None:
        """Files with a correct checksum that end anywhere, or have any number anywhere."""
        rest = contents[HEADER.size :]
        words = len(rest) // 8
        forged = [rest[: len(rest) * part // 40] for part in range(40)]
        for number in range(120):
            at = 8 * (number * words // 120)
            value = (-1, 1 << 62, 1 << 31, 7)[number % 4]
            forged.append(rest[:at] + struct.pack("<q", value) + rest[at + 8 :])
        paths = [tmp_path / str(number) for number in range(len(forged))]
        for path, one in zip(paths, forged, strict=True):
            path.write_bytes(_bundle(one))
        said = self._read(deployed, *paths)
        assert len(said) == len(paths)
        assert all("does not hold what it should" in one for one in said[:40])

    def test_a_form_that_no_bundle_has(
        self, deployed: Deployed, logging_driver: Path, path: Path
    ) -> None:
        """The error names the operator, its tensors, the geometry, the GPU and the bundles."""
        ended = deployed.run("call", LD_PRELOAD=str(logging_driver), FASTCONV_BUNDLE=str(path))
        assert ended.returncode == 1
        for words in (
            "no bundle has the form fastconv::fused",
            "input Float of size [2, 4, 9, 8] with strides [288, 72, 8, 1];",
            "weight Float of size [6, 2, 3, 3] with strides [18, 9, 3, 1];",
            "bias Float of size [6]",
            "residual Float of size [2, 6, 5, 8] with strides [240, 40, 8, 1] at an unaligned",
            "stride [2, 1], padding [1, 1, 2, 2], dilation [1, 2], groups 2, precision tf32",
            "activation leaky_relu of slope 0.25",
            "on cuda:0, sm_90 with 132 SMs",
            f"Bundles loaded: {path}",
            "fastconv bundle PACKAGE.pt2",
        ):
            assert words in ended.stderr


def _bundle(rest: bytes) -> bytes:
    """A file with a correct header."""
    return HEADER.pack(bundle_file._TITLE, bundle_file._FORMAT, len(rest), zlib.crc32(rest)) + rest


class TestWriting:
    def test_forms_are_recorded_once_and_also_if_known(self) -> None:
        x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
        for _ in range(2):
            (form,) = record(lambda: [fastconv.conv2d(x, w) for _ in range(2)], ())
            assert (form.operator, form.shapes) == ("forward", ((2, 3, 5, 5), (4, 3, 3, 3)))

    def test_each_example_adds_its_forms(self) -> None:
        w = torch.randn(4, 3, 3, 3)
        examples = (torch.randn(2, 3, 5, 5), (torch.randn(3, 3, 5, 5), 2))
        model = lambda x, stride=1: fastconv.conv2d(x, w, stride=stride)  # noqa: E731
        forms = record(model, *examples)
        assert [form.shapes[0][0] for form in forms] == [2, 3]

    def test_cubins_are_written_once(self, forms: dict[str, Form]) -> None:
        one = deployment.compose([forms["fused"]], [H200])
        assert len(deployment.compose([forms["fused"]] * 5, [H200])) < 5 * len(one)
        two = deployment.compose([forms["fused"]], [H200, GPUS["sm_80"]])
        assert b"sm_90a" in two
        assert b"sm_80 " in two

    def test_kernels_are_compiled_for_each_gpu(self) -> None:
        x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 1, 1)
        contents = bundles.compose(record(lambda: fastconv.conv2d(x, w), ()), [GPUS["sm_80"]])
        assert contents.count(b"\x7fELF") >= 1

    def test_complex_numbers_need_python(self) -> None:
        x, w = torch.randn(1, 2, 4, 4).cfloat(), torch.randn(3, 2, 1, 1).cfloat()
        forms = record(lambda: fastconv.conv2d(x, w), ())
        with pytest.raises(ExportError, match=r"fastconv::forward of torch.complex64 .* \[1, 2, 4"):
            bundles.compose(forms, [H200])

    def test_empty_tensors_have_no_launches(self) -> None:
        w = torch.randn(3, 2, 1, 1)
        (form,) = record(lambda: fastconv.conv2d(torch.randn(0, 2, 4, 4), w), ())
        planned = bundles._planned(form, H200)
        assert (planned.launches, planned.is_filled) == ((), False)
        x = torch.randn(1, 0, 4, 4)
        (form,) = record(lambda: fastconv.conv2d(x, torch.randn(3, 0, 1, 1)), ())
        planned = bundles._planned(form, H200)
        assert (planned.launches, planned.is_filled) == ((), True)

    def test_gpus(self, forms: dict[str, Form]) -> None:
        some = [forms["fused"]._replace(device=torch.device("cuda", 0))]
        small = Gpu("sm_90a", 114, H200.shared_bytes_per_block, H200.shared_bytes_per_sm)
        with mock.patch.object(bundles.cuda, "gpu", return_value=small):
            assert bundles.chosen_gpus([], some) == [small]
            assert bundles.chosen_gpus(["sm_90", "sm_80"], some) == [small, GPUS["sm_80"]]
            with pytest.raises(ExportError, match="no GPU 'sm_1': known are sm_70"):
                bundles.chosen_gpus(["sm_1"], some)

    def test_nothing_to_bundle(self, tmp_path: Path) -> None:
        layer = fastconv.Conv2d(3, 4, 3)
        with deployment.recording(), pytest.raises(ExportError, match=r"no operator .* on a GPU"):
            fastconv.bundle(layer, torch.randn(1, 3, 5, 5), output=tmp_path / "model.fastconv")
        assert not (tmp_path / "model.fastconv").exists()


class TestCommand:
    @pytest.mark.parametrize(
        ("inputs", "words"),
        [
            (None, "cannot read"),
            ({"x": 1}, "should hold a tensor or a tuple of arguments, but has a dict"),
            (torch.zeros(1), "there is no package"),
        ],
        ids=["missing", "dict", "package"],
    )
    def test_errors(
        self, inputs: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        example = tmp_path / "example.pt"
        if inputs is not None:
            torch.save(inputs, example)
        package, output = str(tmp_path / "model.pt2"), str(tmp_path / "model.fastconv")
        assert cli.main(["bundle", package, "--inputs", str(example), "-o", output]) == 2
        assert words in capsys.readouterr().err
