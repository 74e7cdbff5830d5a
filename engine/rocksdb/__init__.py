"""RocksDB directories, opened in raw mode only: the only importer of rocksdict."""
