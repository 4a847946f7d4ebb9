"""The quantized model beside the float one in ONNX Runtime: outputs, and every attention by itself."""

from attnquant.verification.run import verify
from attnquant.verification.values import OutputRow, ProviderReport, QuantizerRow, SiteVerdict, VerificationReport

__all__ = ["OutputRow", "ProviderReport", "QuantizerRow", "SiteVerdict", "VerificationReport", "verify"]
