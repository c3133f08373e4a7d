"""What the native host path launches, seen by a driver that only records."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastconv
from fastconv import native
from native.driver import Driver, Launching, Trouble
from native.helpers import BIAS, INPUT, WEIGHT, Host, tensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")


class TestLaunching(Launching):
    @pytest.mark.parametrize("early", [(), (0,), (1,), (0, 1)], ids=str)
    def test_every_field(self, host: Host, driver: Driver, early: tuple[int, ...]) -> None:
        integers = tuple(("int", value) for value in (-1, 0, 2**31 - 1, -(2**31)))
        self._answer(
            host, driver, self.TENSORS + integers, (*integers, *self.TENSORS[::-1]),
            scratch_bytes=100, early=early,
        )  # fmt: skip
        some = tensors(INPUT, WEIGHT, BIAS)
        output = fastconv.conv2d(*some)
        first, second = driver.launched
        *addresses, scratch = first[-1][:6]
        assert first[:-1] == (0xF0, 5, 6, 7, 128, 1, 1, 0, None)
        assert second[:-1] == (0xF1, 5, 6, 8, 128, 1, 1, 1024, None)
        assert addresses == [*(t.data_ptr() for t in some), 0, output.data_ptr()]
        assert scratch not in addresses
        values = [-1, 0, 2**31 - 1, -(2**31)]
        assert first[-1][6:] == values
        assert second[-1] == [*values, scratch, *addresses[::-1]]
        assert driver.early == [number in early for number in range(2)]

    def test_absent_tensors(self, host: Host, driver: Driver) -> None:
        self._answer(host, driver, self.TENSORS)
        input, weight = tensors(INPUT, WEIGHT)
        output = fastconv.conv2d(input, weight)
        addresses = [t.data_ptr() for t in (input, weight, output)]
        assert driver.launched[0][-1] == [*addresses[:2], 0, 0, addresses[2], 0]

    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    def test_backward(self, host: Host, driver: Driver, bias: bool) -> None:
        self._answer(host, driver, self.TENSORS, scratch_bytes=64)
        some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)[: 2 + bias]
        output = fastconv.conv2d(*some)
        grad_output = torch.randn_like(output)
        input, weight = (t.data_ptr() for t in some[:2])
        gradients = torch.autograd.grad(output, some, grad_output)
        found = [gradient.data_ptr() for gradient in gradients] + [0] * (not bias)
        above = grad_output.data_ptr()
        of_input, of_weight = (values for *_, values in driver.launched[1:])
        assert of_input[:5] == [above, weight, 0, 0, found[0]]
        assert of_weight[:4] == [above, input, found[1], found[2]]
        assert [gradient.shape for gradient in gradients] == [t.shape for t in some]
        assert 0 not in (of_input[5], of_weight[4])

    @pytest.mark.parametrize(
        "copied", [(False, False), (False, True), (True, False), (True, True)], ids=str
    )
    def test_copies(self, host: Host, driver: Driver, copied: tuple[bool, bool]) -> None:
        self._answer(host, driver, self.TENSORS[:3], copied=copied)
        input, weight, bias = tensors((2, 4, 6, 10), WEIGHT, (12,))
        some = (input[..., ::2], weight.transpose(2, 3), bias[::2])
        tensor = iter(some)

        def read(kind: str, address: int) -> Any:
            """The values that a kernel would find if it took the tensor for contiguous."""
            values = ctypes.POINTER(ctypes.c_float).from_address(address)
            return values[: next(tensor).numel()]

        driver._read = read  # type: ignore[method-assign]
        fastconv.conv2d(*some)
        contiguous = [tensor.flatten().tolist() for tensor in some]
        (*_, values) = driver.launched[0]
        assert [a == b for a, b in zip(values, contiguous, strict=True)] == [*copied, True]

    @pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels last"])
    def test_residual(self, host: Host, driver: Driver, channels_last: bool) -> None:
        """A residual is copied unless it has the output's memory format."""
        self._answer(host, driver, self.TENSORS[3:5], channels_last=channels_last)
        *some, residual = tensors(INPUT, WEIGHT, BIAS, (2, 6, 4, 3))
        stored = residual.permute(0, 2, 3, 1) if channels_last else residual

        def read(kind: str, address: int) -> Any:
            values = ctypes.POINTER(ctypes.c_float).from_address(address)
            return ctypes.c_uint64.from_address(address).value, values[: residual.numel()]

        driver._read = read  # type: ignore[method-assign]
        last = residual.to(memory_format=torch.channels_last)
        apart = residual.repeat_interleave(2, 2)[:, :, ::2]
        for given, as_it_is in ((residual, not channels_last), (last, channels_last), (apart, 0)):
            output = fastconv.conv2d(*some, activation="relu", residual=given)
            *_, ((address, values), (to, _)) = driver.launched[-1]
            assert to == output.data_ptr() != address
            assert values == stored.flatten().tolist()
            assert (address == given.data_ptr()) == as_it_is

    def test_maps(self, host: Host, driver: Driver) -> None:
        """Several tensor maps stand among other arguments, in several launches."""
        one, two = bytes(range(128)), bytes(reversed(range(128)))
        arguments = (("map", one, 0), ("int", 7), ("map", two, 1), ("tensor", 2), ("map", one, 4))
        self._answer(host, driver, arguments, (("map", two, 0),))
        for _ in range(2):
            driver.launched.clear()
            input, weight, bias = some = tensors(INPUT, WEIGHT, BIAS)
            output = fastconv.conv2d(*some)

            def map_of(template: bytes, tensor: Tensor) -> tuple[int, bytes]:
                return 0, tensor.data_ptr().to_bytes(8, sys.byteorder) + template[8:]

            assert [values for *_, values in driver.launched] == [
                [map_of(one, input), 7, map_of(two, weight), bias.data_ptr(), map_of(one, output)],
                [map_of(two, input)],
            ]

    def test_a_thread_without_a_context(self, host: Host, driver: Driver) -> None:
        """``trouble`` sets the context, and then exactly the failed call is repeated."""
        troubles = self._answer(host, driver, (("int", 1),), (("int", 2), ("map", bytes(128), 0)))
        some = tensors(INPUT, WEIGHT)
        driver.launch_statuses = [0, 201]
        fastconv.conv2d(*some)
        assert troubles == [(1, -1, 0, 201, False)]
        assert [values[0] for *_, values in driver.launched] == [1, 2, 2]
        driver.launched.clear()
        troubles.clear()
        driver.replace_statuses = [201]
        fastconv.conv2d(*some)
        assert troubles == [(1, 1, some[0].data_ptr(), 201, False)]
        assert [values[0] for *_, values in driver.launched] == [1, 2]

    @pytest.mark.parametrize("statuses", [[1], [201, 201], [201, 700]], ids=str)
    @pytest.mark.parametrize("which", ["launch", "replace"])
    @pytest.mark.parametrize("direction", ["forward", "backward", "grad"])
    def test_errors(
        self, host: Host, driver: Driver, statuses: list[int], which: str, direction: str
    ) -> None:
        troubles = self._answer(host, driver, (("tensor", 0), ("map", bytes(128), 1)))
        input, weight = some = tensors(INPUT, WEIGHT, requires_grad=True)
        output = fastconv.conv2d(*some).sum()
        getattr(driver, f"{which}_statuses")[:] = statuses
        call = {
            "forward": lambda: fastconv.conv2d(*some),
            "backward": lambda: output.backward(retain_graph=True),
            "grad": lambda: torch.autograd.grad(output, input, retain_graph=True),
        }[direction]
        with pytest.raises(Trouble, match=f"^status {statuses[-1]}$"):
            call()
        mapped = (1, weight.data_ptr()) if which == "replace" else (-1, 0)
        expected = [(0, *mapped, status, i > 0) for i, status in enumerate(statuses)]
        assert troubles == expected
        call()  # The error does not last.


class TestFrozenWeights(Launching):
    """The first launch packs the weight into the workspace, the second reads it there."""

    @pytest.fixture(autouse=True)
    def _packing(self, host: Host, driver: Driver) -> Iterator[None]:
        weight, scratch = self.TENSORS[1], self.TENSORS[5]
        self._answer(host, driver, (weight, scratch), (scratch,), packs=1, scratch_bytes=256)
        self.driver = driver
        self.where: dict[int, int] = {}
        yield
        host.module.freeze(False)

    def _packs(self, *some: Tensor) -> bool:
        """Whether a call packs; checks that it reads what was packed last."""
        self.driver.launched.clear()
        fastconv.conv2d(*some)
        *packed, (*_, (read,)) = self.driver.launched
        if packed:
            address, self.where[some[1].data_ptr()] = packed[0][-1]
            assert address == some[1].data_ptr()
        assert read == self.where[some[1].data_ptr()]
        return bool(packed)

    def test_within_and_without(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT)
        assert [self._packs(*some) for _ in range(2)] == [True, True]
        for _ in range(2):
            host.module.freeze(True)
            assert [self._packs(*some) for _ in range(3)] == [True, False, False]
            host.module.freeze(False)
            assert self._packs(*some)

    def test_changes_of_the_weight(self, host: Host) -> None:
        input, weight = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        for change in (lambda: None, weight.neg_, lambda: weight[0].zero_()):
            change()
            assert [self._packs(input, weight) for _ in range(2)] == [True, False]
        assert not self._packs(input + 1, weight)
        assert self._packs(input, weight.clone())
        assert not self._packs(input, weight)

    def test_version_counters_are_silent_about_data(self, host: Host) -> None:
        """Writing through ``.data`` goes unnoticed, which is why users must ask for freezing."""
        input, weight = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        assert self._packs(input, weight)
        weight.data.neg_()
        assert not self._packs(input, weight)

    def test_another_weight_at_the_same_address(self, host: Host) -> None:
        host.module.freeze(True)
        input, weight = tensors(INPUT, WEIGHT)
        memory = weight.clone().numpy()  # PyTorch cannot tell that tensors share this memory.
        for _ in range(3):
            assert self._packs(input, torch.from_numpy(memory))

    def test_not_what_is_recorded_captured_or_copied(self, host: Host) -> None:
        input, weight = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        assert [self._packs(input, weight) for _ in range(2)] == [True, False]
        recorded = weight.detach().requires_grad_()
        assert [self._packs(input, recorded) for _ in range(2)] == [True, True]
        self.driver.captured.value = 1
        assert [self._packs(input, weight) for _ in range(2)] == [True, True]
        self.driver.captured.value = 0

    @torch.no_grad()
    def test_operators_keep_what_layers_own(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compiled graphs compute weights in buffers, which they use again for other weights."""
        geometry = ((1, 1), (0, 0, 0, 0), (1, 1), 1, None)
        monkeypatch.setattr(
            fastconv, "conv2d", lambda *some: torch.ops.fastconv.forward(*some, None, *geometry)
        )
        host.module.register_operators(native._kernels)
        try:
            host.module.freeze(True)
            input, buffer = tensors(INPUT, WEIGHT)
            assert [self._packs(input, buffer) for _ in range(2)] == [True, True]
            layers = buffer.clone().requires_grad_()
            assert [self._packs(input, layers) for _ in range(2)] == [True, False]
        finally:
            native._module.register_operators(native._kernels)

    def test_a_failed_launch_leaves_nothing(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        self.driver.launch_statuses = [0, 1]
        with pytest.raises(Trouble):
            fastconv.conv2d(*some)
        assert [self._packs(*some) for _ in range(2)] == [True, False]

    def test_contexts(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_module", host.module)
        some = tensors(INPUT, WEIGHT)
        with fastconv.frozen_weights():
            assert self._packs(*some)
            with fastconv.frozen_weights():
                assert not self._packs(*some)
            assert not self._packs(*some)
        assert self._packs(*some)
