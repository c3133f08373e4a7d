"""The schemas of the operators ``torch.ops.fastconv.*``, for Python and for C++.

``fastconv.ops.schema`` defines the operators by them and explains them. The library for programs
without Python is compiled with them.
"""

_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str? precision"

SCHEMAS = (
    f"forward(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}) -> Tensor",
    "input_grad(Tensor grad_output, Tensor weight, SymInt[] input_size, "
    f"{_GEOMETRY}, MemoryFormat? memory_format=None) -> Tensor",
    "weight_grad(Tensor grad_output, Tensor input, SymInt[] kernel_size, "
    f"{_GEOMETRY}, bool bias, MemoryFormat? memory_format=None) -> (Tensor, Tensor)",
    "fused(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
    f"{_GEOMETRY}, str activation, float slope) -> Tensor",
    "transposed(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
    f"SymInt[] output_padding, {_GEOMETRY}, str activation, float slope) -> Tensor",
    f"backward(Tensor grad_output, Tensor input, Tensor weight, {_GEOMETRY}, "
    "bool transposed, bool bias) -> (Tensor, Tensor, Tensor)",
)
