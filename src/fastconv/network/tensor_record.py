"""The record of a tensor: its memory, its autograd state and, for real calls, its numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from fastconv.network.records import Record


class TensorRecord(Record):
    """The memory and the autograd state of a tensor with data and, if asked for, its numbers.

    In a dry run (``is_dry``) no tensor is written to, so version counters are put back: autograd
    must not take a tensor that was saved for a backward pass for a modified one. In real calls,
    numbers that differ are written back, and the version counter goes up.
    """

    def __init__(self, of: Tensor, is_dry: bool, has_values: bool) -> None:
        self._of, self._is_dry = of, is_dry
        self._is_leaf, self._wants, self._node = of.is_leaf, of.requires_grad, of.grad_fn
        self._has_grad = self._is_leaf or of.retains_grad
        self._grad = of.grad if self._has_grad else None
        self._version = of._version if is_dry and not of.is_inference() else None
        is_plain = type(of).__torch_dispatch__ is Tensor.__torch_dispatch__
        is_strided = of.layout == torch.strided and not of.is_nested
        self._data = of.data if is_plain and is_strided else None
        self._values: Tensor | None = None
        if has_values and not of.is_meta and is_plain and (is_strided or of.layout in _SPARSE):
            with torch.inference_mode(False), torch.no_grad():
                self._values = of.detach().clone()

    def changed(self) -> bool:
        of = self._of
        return (
            of.requires_grad != self._wants
            or self._has_other_node()
            or (self._has_grad and of.grad is not self._grad)
            or (self._version is not None and of._version != self._version)
            or self.has_other_values()
        )

    def has_other_values(self) -> bool:
        """Whether it has other memory, or other numbers in the memory that it had."""
        return self._has_other_memory() or not self._has_its_numbers()

    def _has_other_node(self) -> bool:
        # Autograd makes another node for a view of a tensor that was written to; in real calls,
        # that is no change of the view itself.
        return (self._is_dry or self._is_leaf) and self._of.grad_fn is not self._node

    def _has_other_memory(self) -> bool:
        of, data = self._of, self._data
        return data is not None and (
            (of.device, of.dtype, of.shape, of.stride(), of.storage_offset())
            != (data.device, data.dtype, data.shape, data.stride(), data.storage_offset())
            or of.untyped_storage()._cdata != data.untyped_storage()._cdata
        )

    def _has_its_numbers(self) -> bool:
        if self._values is None:
            return True
        now = self._of.detach() if self._data is None else self._data
        parts = zip(_parts(now), _parts(self._values), strict=True)
        return now.shape == self._values.shape and all(is_same(*pair) for pair in parts)

    def put_back(self) -> None:
        of = self._of
        has_other_values = self.has_other_values()
        if self._has_other_memory():
            assert self._data is not None
            of.data = self._data
        if self._has_other_node():
            if not self._is_leaf:
                raise RuntimeError(
                    f"a tensor of size {list(of.shape)} that belongs to an autograd graph was "
                    "changed in place, which cannot be undone"
                )
            of.detach_()
        if self._is_leaf and of.requires_grad != self._wants:
            of.requires_grad_(self._wants)
        if self._has_grad and of.grad is not self._grad:
            of.grad = self._grad
        if not self._has_its_numbers():
            self._write()
        if self._version is not None:
            torch._C._autograd._unsafe_set_version_counter((of,), (self._version,))
        elif has_other_values and not of.is_inference():  # inference tensors have no version
            torch.autograd.graph.increment_version(of)

    def _write(self) -> None:
        values, to = self._values, self._of if self._data is None else self._data
        assert values is not None
        with torch.inference_mode(self._of.is_inference()), torch.no_grad():
            if self._data is not None:
                # Along a dimension of stride 0 all elements have one address: copy_ refuses to
                # write to that, so it writes the first of them.
                for dimension, step in enumerate(to.stride()):
                    if step == 0 and to.shape[dimension]:
                        to, values = (one.narrow(dimension, 0, 1) for one in (to, values))
            to.copy_(values)


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors have the same bits, NaN and the sign of zero included."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of the same size, whose equality is that of all bits."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.dtype.itemsize])


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has data: it is not fake, not lazy and not a wrapper of ``torch.func``'s."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (isinstance(tensor, FakeTensor) or is_lazy(tensor) or wrapped)
