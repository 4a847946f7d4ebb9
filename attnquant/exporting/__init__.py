"""PyTorch in: a module, or a model that timm or transformers builds, as a float ONNX model. Needs `attnquant[torch]`.

torch is imported here only, and only when a module is at hand.
"""

from attnquant.exporting.inputs import Inputs, example, example_from, named_samples
from attnquant.exporting.module import OPSET, Exported, export, from_data, is_module

__all__ = ["OPSET", "Exported", "Inputs", "example", "example_from", "export", "from_data", "is_module", "named_samples"]
