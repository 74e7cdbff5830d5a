"""Spark's RocksDB state: what `engine.state_store` is made of (design 0004)."""
