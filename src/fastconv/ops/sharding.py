"""DTensor: how the operators' tensors may be distributed over processes.

Each operator multiplies tensors that share three dimensions: images, output channels, input
channels. Processes may have some indices of any of them; where the operator sums over it, each has
a part of the sum. Of rows and columns, and of channels in groups, every process has all.
"""

from __future__ import annotations

from typing import Any

from fastconv.ops.late import when_imported
from fastconv.ops.schema import (
    BIAS,
    FUSED_GROUPS,
    GROUPS,
    OPERATORS,
    RESIDUAL,
    forward,
    fused,
    input_grad,
    weight_grad,
)

Rule = tuple[list[Any], list[Any]]
"""Placements of the results, and of the arguments: None for those that are no tensors."""


def register() -> None:
    when_imported("torch.distributed.tensor", _register)


def _register() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    # Of a tensor with dimensions (first, second, rows, columns), or of a bias, that has the first.
    all_of, first, second, part = Replicate(), Shard(0), Shard(1), Partial()

    def of_forward(*args: Any) -> list[Rule]:
        biased = args[2] is not None
        rules = [
            _rule(args, [all_of], all_of, all_of, all_of if biased else None),
            _rule(args, [first], first, all_of, all_of if biased else None),
        ]
        if args[GROUPS] == 1:
            rules.append(_rule(args, [second], all_of, first, first if biased else None))
        if args[GROUPS] == 1 and not biased:  # of parts of a sum, but one may have the bias
            rules.append(_rule(args, [part], second, second))
        return rules

    def of_fused(*args: Any) -> list[Rule]:
        # No parts of sums: an activation of a part is no part of the activation.
        biased, added = args[2] is not None, args[RESIDUAL] is not None

        def rule(result: Any, input: Any, weight: Any, bias: Any) -> Rule:
            bias, residual = bias if biased else None, result if added else None
            return _rule(args, [result], input, weight, bias, residual)

        rules = [rule(all_of, all_of, all_of, all_of), rule(first, first, all_of, all_of)]
        if args[FUSED_GROUPS] == 1:
            rules.append(rule(second, all_of, first, first))
        return rules

    def of_input_grad(*args: Any) -> list[Rule]:
        rules = [_rule(args, [all_of], all_of, all_of), _rule(args, [first], first, all_of)]
        if args[GROUPS] == 1:
            rules.append(_rule(args, [part], second, first))
            rules.append(_rule(args, [second], all_of, second))
        return rules

    def of_weight_grad(*args: Any) -> list[Rule]:
        biased = args[BIAS]
        rules = [
            _rule(args, [all_of, all_of], all_of, all_of),
            _rule(args, [part, part if biased else all_of], first, first),
        ]
        if args[GROUPS] == 1:
            rules.append(_rule(args, [first, first if biased else all_of], second, all_of))
            rules.append(_rule(args, [second, all_of], all_of, second))
        return rules

    register_sharding(forward)(of_forward)
    register_sharding(input_grad)(of_input_grad)
    register_sharding(weight_grad)(of_weight_grad)
    register_sharding(fused)(of_fused)
    # DTensor remembers a result's form by the arguments. register_sharding has it compare those
    # from the first int on, but here lists of ints come before it: a stride changes the form, too.
    compared = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for operator in OPERATORS.values():
        compared[operator.call] = RuntimeSchemaInfo(static_argnum=2, needs_pytree=True)


def _rule(args: Any, results: list[Any], *tensors: Any) -> Rule:
    """That of results, if tensors are placed so."""
    return results, [*tensors, *(None for _ in args[len(tensors) :])]
