"""DTensor: how the operators' tensors may be distributed over processes.

The tensors of an operator share three dimensions: images, output channels and input channels. Each
of these may be sharded; where the operator sums over the sharded dimension, each process holds a
partial sum. Rows and columns, and channels in groups, are never sharded.

Those of batch normalization may be sharded by channels, of which each has its own statistics. The
statistics of a batch are those of all its images, as in PyTorch: DTensor gathers images that are
distributed. In evaluation, these may stay where they are.
"""

from __future__ import annotations

from typing import Any

from fastconv.ops import batchnorm_schema
from fastconv.ops.arguments import (
    BackwardArguments,
    ForwardArguments,
    FusedArguments,
    InputGradArguments,
    TransposedArguments,
    WeightGradArguments,
)
from fastconv.ops.late import when_imported
from fastconv.ops.schema import (
    OPERATORS,
    backward,
    forward,
    fused,
    input_grad,
    transposed,
    weight_grad,
)

Rule = tuple[list[Any], list[Any]]
"""Placements of the results and of the arguments: None for arguments that are no tensors."""


def register() -> None:
    when_imported("torch.distributed.tensor", _register)


def _register() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    # Placements of tensors with dimensions (first, second, rows, columns); a bias has only the
    # first dimension.
    all_of, first, second, part = Replicate(), Shard(0), Shard(1), Partial()

    def of_forward(*args: Any) -> list[Rule]:
        given = ForwardArguments(*args)
        biased = given.bias is not None
        rules = [
            _rule(args, [all_of], all_of, all_of, all_of if biased else None),
            _rule(args, [first], first, all_of, all_of if biased else None),
        ]
        if given.groups == 1:
            rules.append(_rule(args, [second], all_of, first, first if biased else None))
        if given.groups == 1 and not biased:  # a bias may be added to one partial sum only
            rules.append(_rule(args, [part], second, second))
        return rules

    def of_fused(*args: Any) -> list[Rule]:
        # No rule has partial sums, because activations are not linear.
        given = FusedArguments(*args)
        biased, added = given.bias is not None, given.residual is not None

        def rule(result: Any, input: Any, weight: Any, bias: Any) -> Rule:
            bias, residual = bias if biased else None, result if added else None
            return _rule(args, [result], input, weight, bias, residual)

        rules = [rule(all_of, all_of, all_of, all_of), rule(first, first, all_of, all_of)]
        if given.groups == 1:
            rules.append(rule(second, all_of, first, first))
        return rules

    def of_transposed(*args: Any) -> list[Rule]:
        given = TransposedArguments(*args)
        biased, added = given.bias is not None, given.residual is not None

        def rule(result: Any, input: Any, weight: Any, bias: Any) -> Rule:
            bias, residual = bias if biased else None, result if added else None
            return _rule(args, [result], input, weight, bias, residual)

        rules = [rule(all_of, all_of, all_of, all_of), rule(first, first, all_of, all_of)]
        if given.groups == 1:
            rules.append(rule(second, all_of, second, first))
        linear = not (biased or added) and given.activation == "identity"
        if given.groups == 1 and linear:
            rules.append(rule(part, second, first, None))
        return rules

    def of_input_grad(*args: Any) -> list[Rule]:
        rules = [_rule(args, [all_of], all_of, all_of), _rule(args, [first], first, all_of)]
        if InputGradArguments(*args).groups == 1:
            rules.append(_rule(args, [part], second, first))
            rules.append(_rule(args, [second], all_of, second))
        return rules

    def of_weight_grad(*args: Any) -> list[Rule]:
        given = WeightGradArguments(*args)
        biased = given.bias
        rules = [
            _rule(args, [all_of, all_of], all_of, all_of),
            _rule(args, [part, part if biased else all_of], first, first),
        ]
        if given.groups == 1:
            rules.append(_rule(args, [first, first if biased else all_of], second, all_of))
            rules.append(_rule(args, [second, all_of], all_of, second))
        return rules

    def of_backward(*args: Any) -> list[Rule]:
        given = BackwardArguments(*args)

        def rule(results: list[Any], grad: Any, input: Any, weight: Any) -> Rule:
            *both, bias = results
            return _rule(args, [*both, bias if given.bias else all_of], grad, input, weight)

        rules = [
            rule([all_of, all_of, all_of], all_of, all_of, all_of),
            rule([first, part, part], first, first, all_of),
        ]
        if given.groups == 1:
            # The dimensions of the weight's output and input channels.
            out, into = (second, first) if given.transposed else (first, second)
            rules.append(rule([part, out, first], second, all_of, out))
            rules.append(rule([second, into, all_of], all_of, second, into))
        return rules

    def of_norm(*args: Any) -> list[Rule]:
        given = batchnorm_schema.Arguments(*args)
        rules = [
            _of_given(args, [all_of] * 3, [all_of] * 7),
            _of_given(args, [second, first, first], [second] * 2 + [first] * 4 + [all_of]),
        ]
        if not given.training:
            rules.append(_of_given(args, [first, all_of, all_of], [first] * 2 + [all_of] * 5))
        if not given.training or given.running_mean is None:
            return rules
        # They are updated in place, so they stay as they are distributed.
        running = [one for spec in args[4:6] for one in spec.placements]
        kept = [rule for rule in rules if all(one == rule[1][4] for one in running)]
        if not kept:
            raise NotImplementedError(
                "fastconv::batch_norm_forward updates running statistics in place: they have to be "
                "distributed as Replicate() or as Shard(0) by all dimensions of the mesh, but "
                f"running_mean is distributed as {args[4].placements}, running_var as "
                f"{args[5].placements}"
            )
        return kept

    def of_norm_grad(*args: Any) -> list[Rule]:
        given = batchnorm_schema.GradArguments(*args)
        stores = given.wants_residual and given.activation != "identity"
        parameters = given.wants_parameters
        wanted = (given.wants_x, stores, parameters, parameters)

        def rule(image: Any, channel: Any, results: list[Any]) -> Rule:
            # What is not wanted is an empty tensor.
            made = [one if wants else all_of for one, wants in zip(results, wanted, strict=True)]
            return _of_given(args, made, [image] * 3 + [channel] * 4)

        rules = [
            rule(all_of, all_of, [all_of] * 4),
            rule(second, first, [second, second, first, first]),
        ]
        if not given.of_batch:
            rules.append(rule(first, all_of, [first, first, part, part]))
        return rules

    register_sharding(batchnorm_schema.forward)(of_norm)
    register_sharding(batchnorm_schema.backward)(of_norm_grad)
    register_sharding(forward)(of_forward)
    register_sharding(input_grad)(of_input_grad)
    register_sharding(weight_grad)(of_weight_grad)
    register_sharding(fused)(of_fused)
    register_sharding(transposed)(of_transposed)
    register_sharding(backward)(of_backward)
    # DTensor caches the form of a result by the arguments. register_sharding has it compare only
    # the arguments from the first int on, but strides, which change the form, are lists before it.
    compared = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for operator in (*(operator.call for operator in OPERATORS.values()), backward):
        compared[operator] = RuntimeSchemaInfo(static_argnum=2, needs_pytree=True)
    for operator in (batchnorm_schema.forward, batchnorm_schema.backward):
        compared[operator] = RuntimeSchemaInfo(static_argnum=7, needs_pytree=True)


def _of_given(args: Any, results: list[Any], placements: list[Any]) -> Rule:
    """Returns the rule with these placements of the first arguments, so far as they are given."""
    given = zip(args, placements, strict=False)
    return _rule(args, results, *(None if one is None else place for one, place in given))


def _rule(args: Any, results: list[Any], *tensors: Any) -> Rule:
    """Returns the rule with these placements of the results and of the first arguments."""
    return results, [*tensors, *(None for _ in args[len(tensors) :])]
