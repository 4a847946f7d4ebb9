"""Encoder, decoder and decoder with past of one model, calibrated together from real generation. See docs/seq2seq.md."""

from attnquant.seq2seq.caches import Cache
from attnquant.seq2seq.generation import Recording, record
from attnquant.seq2seq.run import FILES, Seq2SeqResult, quantize_seq2seq
from attnquant.seq2seq.wiring import Inputs, Wiring, wire

__all__ = ["FILES", "Cache", "Inputs", "Recording", "Seq2SeqResult", "Wiring", "quantize_seq2seq", "record", "wire"]
