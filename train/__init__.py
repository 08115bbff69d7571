"""Training: shards → drafter. Plain torch; one process per GPU, one thread per process, one captured graph per step."""
