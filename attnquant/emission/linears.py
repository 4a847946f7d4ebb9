"""Reading quantized linears: what every pass on MatMul and Gemm needs to know about one."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.graph import constant, is_blocked, is_onnx, is_weight_dequantize, weight_axis

MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
"""Operators through which a dequantized weight reaches its product; the runtime folds them."""


def quantized_linears(model: ir.Model) -> Iterator["Linear"]:
    """MatMul and Gemm nodes of the main graph with a quantized activation and a quantized constant weight."""
    for node in model.graph:
        if is_onnx(node, "MatMul", "Gemm"):
            found = read(node)
            if found is not None:
                yield found


def read(node: ir.Node) -> "Linear | None":
    """The quantized linear at a MatMul or Gemm node; None where there is none."""
    sources = [dequantize_behind(value) for value in node.inputs[:2]]
    weights = [place for place, source in enumerate(sources) if is_weight_dequantize(source)]
    activation = sources[1 - weights[0]] if len(weights) == 1 else None
    if activation is None or not is_onnx(activation, "DequantizeLinear"):
        return None
    weight = sources[weights[0]]
    return None if weight is None else Linear(node=node, weight=weight, activation=activation, weight_index=weights[0])


def dequantize_behind(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that a value comes from, moves in between; None where it is something else."""
    while value is not None:
        node = value.producer()
        if node is None or not is_onnx(node, "DequantizeLinear", *MOVES):
            return None
        if is_onnx(node, "DequantizeLinear"):
            return node
        value = node.inputs[0]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A product of a quantized activation and a quantized constant weight."""

    node: ir.Node
    weight: ir.Node
    """DequantizeLinear of the weight."""
    activation: ir.Node
    """DequantizeLinear of the activation."""
    weight_index: int
    """Which operand the weight is: 1, or 0 for a weight on the left."""

    @property
    def weight_value(self) -> np.ndarray:
        """The weight's integers as stored."""
        array = constant(self.weight.inputs[0])
        if array is None:
            msg = f"node {self.weight.name!r} has no constant input"
            raise ValueError(msg)
        return array

    @property
    def weight_scale(self) -> np.ndarray | None:
        """float32 scalar, or vector along the weight's channel axis; None where it is computed."""
        return constant(self.weight.inputs[1])

    @property
    def activation_scale(self) -> np.ndarray | None:
        """float32 scalar; None where it is computed, or one per channel."""
        scale = constant(self.activation.inputs[1])
        return scale if scale is not None and scale.size == 1 else None

    @property
    def output(self) -> ir.Value:
        """What the node computes."""
        return self.node.outputs[0]

    @property
    def out_axis(self) -> int | None:
        """Axis of the stored weight that becomes the output's last; None for weights that are no matrix or are reshaped."""
        if self.weight_value.ndim != 2 or self.weight_index != 1:
            return None
        axis = weight_axis(self.node)
        value = self.node.inputs[1]
        while value is not None and value.producer() is not self.weight:
            move = value.producer()
            if move is None or not is_onnx(move, "Transpose", "Identity"):
                return None
            axis = 1 - axis if is_onnx(move, "Transpose") and move.attributes.get_ints("perm", [1, 0]) == [1, 0] else axis
            value = move.inputs[0]
        return axis

    @property
    def product_scale(self) -> np.ndarray | None:
        """float32 s_x * s_w, one per output channel; None where the weight's channels are not the output's."""
        axis, weight, activation = self.out_axis, self.weight_scale, self.activation_scale
        if axis is None or weight is None or activation is None or weight.dtype != np.float32:
            return None
        width = self.weight_value.shape[axis]
        if weight.ndim == 0 or weight.size == 1:
            return np.full(width, weight.reshape(()) * activation.reshape(()), np.float32)
        own = self.weight.attributes.get_int("axis", 1) % 2
        if own != axis or is_blocked(self.weight) or weight.shape != (width,):
            return None
        return np.asarray(weight * activation.reshape(()))
