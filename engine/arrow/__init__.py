"""Rows and keys of state as columns, by pyarrow and numpy; PySpark is not needed."""
