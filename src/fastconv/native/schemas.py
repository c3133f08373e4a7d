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

NORM_SCHEMAS = (
    "batch_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? batches, bool training, "
    "float momentum, float eps, str activation, float slope) -> (Tensor, Tensor, Tensor)",
    "batch_norm_backward(Tensor grad, Tensor x, Tensor? beside, Tensor? weight, Tensor? bias, "
    "Tensor mean, Tensor invstd, bool of_batch, bool residual, str activation, float slope, "
    "bool wants_x, bool wants_parameters, bool wants_residual) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
"""Those of batch normalization, which ``fastconv.ops.batchnorm_schema`` defines and explains."""
