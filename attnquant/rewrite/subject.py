"""One operator to be written out, with everything that is known about it."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.dtypes import TypeMap
from attnquant.operators import Operator
from attnquant.patterns.facts import Facts
from attnquant.rewrite.product import Product
from attnquant.rewrite.result import Refused
from attnquant.roles import PortRole
from attnquant.site import AttentionSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An attention operator, its site, and the facts about the model."""

    operator: Operator
    site: AttentionSite
    facts: Facts
    types: TypeMap

    def tensor(self, role: PortRole) -> ir.Value:
        """The tensor at a port that has to be connected. Raises Refused where it is not."""
        value = self.operator.value(role)
        if value is None:
            raise Refused(f"the operator has no {role}")
        return value

    def input(self, name: str) -> ir.Value | None:
        """The tensor at the input with this published name, None where it is left out."""
        index = next((port.index for port in self.operator.row.inputs if port.name == name), None)
        inputs = self.operator.node.inputs
        return None if index is None or index >= len(inputs) else inputs[index]

    def rank(self, role: PortRole) -> int:
        """The rank of the tensor at a port. Raises Refused where the graph does not say."""
        return self.rank_of(self.tensor(role), role.value)

    def rank_of(self, value: ir.Value, what: str) -> int:
        """The rank of a tensor. Raises Refused where the graph does not say."""
        rank = self.facts.rank(value)
        if rank is None:
            raise Refused(f"the graph does not say how many axes the {what} has: pass one set of inputs as feeds")
        return rank

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """Element type of a tensor."""
        return self.types.dtype(value)

    def width(self, value: ir.Value, axis: int) -> int | None:
        """Size of an axis where it is a number."""
        size = self.facts.axis_size(value, axis)
        return size if isinstance(size, int) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """A drafted attention: what takes the place of the operator's outputs, and the tensors to observe."""

    outputs: Mapping[int, ir.Value | None]
    """{output index: new tensor}; None for an output that can't be made."""
    query: ir.Value
    key: ir.Value
    value: ir.Value
    product: Product
