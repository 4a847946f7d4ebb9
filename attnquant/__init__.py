"""Attention-aware post-training quantization on NNCF, checked in ONNX Runtime.

Every public name is imported on first use: `import attnquant` loads neither NNCF nor ONNX Runtime.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from attnquant.bridge import ExportResult as ExportResult
    from attnquant.bridge import export_onnx as export_onnx
    from attnquant.check import CheckReport as CheckReport
    from attnquant.check import check as check
    from attnquant.conformance import ConformanceReport as ConformanceReport
    from attnquant.conformance import conformance as conformance
    from attnquant.errors import AttnQuantError as AttnQuantError
    from attnquant.extension import disable as disable
    from attnquant.extension import enable as enable
    from attnquant.extension import extended as extended
    from attnquant.placement import QuantizerSetup as QuantizerSetup
    from attnquant.quantization import QuantizationResult as QuantizationResult
    from attnquant.quantization import plan as plan
    from attnquant.quantization import quantize as quantize
    from attnquant.recipe import QuantizationRecipe as QuantizationRecipe
    from attnquant.recognition import recognize as recognize
    from attnquant.rewrite import RewriteResult as RewriteResult
    from attnquant.rewrite import RewriteRow as RewriteRow
    from attnquant.rewrite import expand as expand
    from attnquant.rewrite import fuse as fuse
    from attnquant.roles import PortRole as PortRole
    from attnquant.seq2seq import Seq2SeqResult as Seq2SeqResult
    from attnquant.seq2seq import quantize_seq2seq as quantize_seq2seq
    from attnquant.site import AttentionSite as AttentionSite
    from attnquant.site import Recognition as Recognition
    from attnquant.target import Target as Target
    from attnquant.verification import VerificationReport as VerificationReport
    from attnquant.verification import verify as verify

_HOMES = {
    "AttentionSite": "site",
    "AttnQuantError": "errors",
    "CheckReport": "check",
    "ConformanceReport": "conformance",
    "ExportResult": "bridge",
    "PortRole": "roles",
    "QuantizationRecipe": "recipe",
    "QuantizationResult": "quantization",
    "QuantizerSetup": "placement",
    "Recognition": "site",
    "RewriteResult": "rewrite",
    "RewriteRow": "rewrite",
    "Seq2SeqResult": "seq2seq",
    "Target": "target",
    "VerificationReport": "verification",
    "check": "check",
    "conformance": "conformance",
    "disable": "extension",
    "enable": "extension",
    "expand": "rewrite",
    "export_onnx": "bridge",
    "extended": "extension",
    "fuse": "rewrite",
    "plan": "quantization",
    "quantize": "quantization",
    "quantize_seq2seq": "seq2seq",
    "recognize": "recognition",
    "verify": "verification",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 (the keys are strings)


class _Package(ModuleType):
    """Keeps a function from being hidden by the module of the same name, which importing the module would do."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


sys.modules[__name__].__class__ = _Package
