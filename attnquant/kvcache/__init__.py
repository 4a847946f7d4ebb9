"""The KV cache in int8 or int4, by com.microsoft GroupQueryAttention: scales, graph, metadata. See docs/kv-cache.md."""

from attnquant.kvcache.convert import CacheResult, quantize_caches
from attnquant.kvcache.layers import require_target, with_grouped
from attnquant.kvcache.storage import CACHE_KEY, Change, KvCache, KvLayer, forms, stored_cache

__all__ = [
    "CACHE_KEY", "CacheResult", "Change", "KvCache", "KvLayer", "forms", "quantize_caches", "require_target", "stored_cache",
    "with_grouped",
]  # fmt: skip
