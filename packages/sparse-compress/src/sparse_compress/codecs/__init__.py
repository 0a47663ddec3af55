"""Wire codecs: fewer bytes for values and indices."""

from sparse_compress.codecs.dense_codec import DenseCodec
from sparse_compress.codecs.wire_codec import WireCodec, index_entropy

__all__ = ["DenseCodec", "WireCodec", "index_entropy"]
