"""Spark's RocksDB state: what `engine.state.store` is made of (design 0004)."""
