"""Data and target to shards: tokenise and plan, then run the plan through the target and store what its layers say.

With `speculate` the only user of `transformers`. Nothing here trains; the cache on disk is all that `train` sees.
"""
