"""Attention-aware post-training quantization on NNCF, checked in ONNX Runtime."""

__version__ = "0.1.0"
