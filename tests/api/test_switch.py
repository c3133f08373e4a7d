"""``FASTCONV_FAMILY`` and ``planner.only`` choose a family; their plans do not outlive them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastconv import bypass, cli, native
from fastconv.backends import cuda
from fastconv.exporter import plans
from fastconv.jit import launch
from fastconv.kernels import planner
from fastconv.kernels.family import Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.kernels.planner import EVERY, Switch, SwitchError
from fastconv.ops import entries
from fastconv.ops.schema import OPERATORS
from fastconv.problem import NO_EPILOGUE, Problem

PASSES = (planner.forward, planner.input_grad, planner.weight_grad)
PROBLEM = Problem.of((8, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
DEPTHWISE = Problem.of((8, 64, 56, 56), (64, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 64)
HALF = Operands("fastconv::float16", 2, False, False, (576, 9, 3, 1), True)
UNKNOWN = {
    "volta": "no kernel family 'volta': known are .*hopper, .*direct",
    "hopper:sm_99": r"no GPU 'sm_99': known are sm_70 \(V100\), .*",
    "hopper:": "no GPU ''",
    ":sm_86": "no kernel family ''",
    "Hopper": "no kernel family 'Hopper'",
}


@pytest.fixture(autouse=True)
def _read_again() -> Iterator[None]:
    planner.of_process.cache_clear()
    yield
    planner.of_process.cache_clear()


def _shared(plan: Plan) -> int:
    return max(launch.shared_bytes for launch in plan.launches)


# --- What it does ---------------------------------------------------------------------------------


def test_families_are_those_of_the_lists() -> None:
    assert planner.families()[-1] == "direct"
    assert "hopper" in planner.families()


@pytest.mark.parametrize("plan_pass", PASSES)
def test_one_family_alone(plan_pass: planner.Pass) -> None:
    assert plan_pass(PROBLEM, HALF, H200).family == "hopper"
    with planner.only("direct"):
        plan = plan_pass(PROBLEM, HALF, H200)
        assert plan.family == "direct"
        assert plan.why.endswith("; planned by direct alone")
        with planner.only("hopper"):
            assert plan_pass(PROBLEM, HALF, H200).family == "hopper"
            assert plan_pass(DEPTHWISE, HALF, H200).family == "direct", "what it declines"
            assert plan_pass(PROBLEM, HALF, GPUS["sm_80"]).family == "direct"
        assert plan_pass(PROBLEM, HALF, H200).family == "direct"
    assert plan_pass(PROBLEM, HALF, H200).family == "hopper"


@pytest.mark.parametrize("plan_pass", PASSES)
@pytest.mark.parametrize("family", ["hopper", "direct"])
def test_limits_of_another_gpu(plan_pass: planner.Pass, family: str) -> None:
    with planner.only(family):
        whole = plan_pass(PROBLEM, HALF, H200)
    with planner.only(family, limits="sm_75"):
        plan = plan_pass(PROBLEM, HALF, H200)
        assert _shared(plan) <= GPUS["sm_75"].shared_bytes_per_block
        assert plan.launches != whole.launches or _shared(whole) <= _shared(plan)
    small = Switch(family, "sm_75").gpu(H200)
    assert (small.architecture, small.sm_count) == (H200.architecture, H200.sm_count)


def test_a_gpu_never_has_more_than_its_own() -> None:
    assert Switch("direct", "sm_90a").gpu(GPUS["sm_86"]) == GPUS["sm_86"]


def test_it_ends_with_its_context() -> None:
    with pytest.raises(KeyError), planner.only("direct"):
        raise KeyError
    assert planner.current() == EVERY


@pytest.mark.parametrize("value", UNKNOWN)
def test_unknown(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, colon, limits = value.partition(":")
    with (
        pytest.raises(ValueError, match=UNKNOWN[value]),
        planner.only(family, limits if colon else None),
    ):
        pass
    monkeypatch.setenv("FASTCONV_FAMILY", value)
    with pytest.raises(SwitchError, match=rf"FASTCONV_FAMILY .* got '{value}': {UNKNOWN[value]}"):
        planner.forward(PROBLEM, HALF, H200)
    assert not bypass.is_on()


def test_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCONV_FAMILY", "direct:sm_120")
    assert planner.current() == Switch("direct", "sm_120a")
    assert planner.forward(PROBLEM, HALF, H200).family == "direct"
    monkeypatch.setenv("FASTCONV_FAMILY", "hopper")
    assert planner.current() == Switch("direct", "sm_120a"), "read once"
    with planner.only("hopper"):
        assert planner.current() == Switch("hopper")
    assert str(planner.current()) == "direct:sm_120a"


@pytest.mark.parametrize("value", ["", None])
def test_no_variable(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTCONV_FAMILY", raising=False)
    if value is not None:
        monkeypatch.setenv("FASTCONV_FAMILY", value)
    assert planner.current() == EVERY


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["info", "--device", "cpu", "--pass", "forward", "--dtype", "float16", "--shape",
             "8x64x56x56 64x64x3x3"]  # fmt: skip
    assert cli.main(words) == 0
    assert "FASTCONV_FAMILY" not in capsys.readouterr().out
    monkeypatch.setenv("FASTCONV_FAMILY", "direct:sm_86")
    planner.of_process.cache_clear()
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "FASTCONV_FAMILY=direct:sm_86" in shown
    assert "planned by direct:sm_86 alone" in shown
    monkeypatch.setenv("FASTCONV_FAMILY", "volta")
    planner.of_process.cache_clear()
    assert cli.main(words) == 2
    assert "no kernel family 'volta'" in capsys.readouterr().err


# --- Whatever keeps plans -------------------------------------------------------------------------


def _uncompiled(launches: Any, *_: Any) -> Any:
    return SimpleNamespace(description=launches, trouble=None)


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors get plans for an H200, which are not compiled."""
    monkeypatch.setattr(cuda, "gpu", lambda index: H200)
    monkeypatch.setattr(native, "start_build", lambda: None)
    monkeypatch.setattr(launch, "load_launches", _uncompiled)
    monkeypatch.setattr(torch, "device", lambda *_: None)
    cuda._ready.cache_clear()


def _family() -> str:
    shapes = (PROBLEM.input_shape, PROBLEM.output_shape, PROBLEM.weight_shape)
    roles = [torch.empty(shape, dtype=torch.float16) for shape in shapes]
    return cuda.family(planner.forward, PROBLEM, *roles, None)


@pytest.mark.usefixtures("_on_a_gpu")
def test_plans_that_the_backend_keeps() -> None:
    for _ in range(2):
        assert _family() == "hopper"
        with planner.only("direct"):
            assert _family() == "direct"
            with planner.only("hopper", "sm_86"):
                assert _family() == "hopper"
    assert cuda._ready.cache_info().misses == 3
    assert cuda._ready.cache_info().hits == 3


@pytest.mark.usefixtures("_on_a_gpu")
def test_entries_are_the_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of the native host path stay in its table, whatever is set at that moment."""
    input, weight = (
        torch.empty(shape, dtype=torch.float16)
        for shape in (PROBLEM.input_shape, PROBLEM.weight_shape)
    )
    result = SimpleNamespace(
        problem=PROBLEM, shape=PROBLEM.output_shape, memory_format=None,
        device=SimpleNamespace(type="cuda"), epilogue=NO_EPILOGUE,
        new=lambda: torch.empty(PROBLEM.output_shape, dtype=torch.float16),
    )  # fmt: skip

    def sources() -> set[str]:
        arguments = (input, weight, None, (1, 1), (1, 1, 1, 1), (1, 1), 1, "ieee")
        given = OPERATORS["forward"].arguments(*arguments)
        entry = entries._entry(OPERATORS["forward"], result, given)  # type: ignore[arg-type]
        return {launch.kernel.source.split("/")[0] for launch in entry.launches}

    with planner.only("direct"):
        assert sources() == {"hopper"}
    monkeypatch.setenv("FASTCONV_FAMILY", "direct")
    planner.of_process.cache_clear()
    with planner.only("hopper"):
        assert sources() == {"direct"}


def test_exported_plans_are_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plans.text([PROBLEM], ["float16"])
    monkeypatch.setenv("FASTCONV_FAMILY", "direct")
    planner.of_process.cache_clear()
    assert plans.text([PROBLEM], ["float16"]) == expected
    with planner.only("direct"):
        assert plans.text([PROBLEM], ["float16"]) == expected
