"""The cache: configuration, format, codecs, writing, reading, verification and statistics.

The contract between `extract` and `train`. Imports neither torch nor transformers.
"""
