"""Metrics for Prometheus: of runs, of the status of a repository, of state stores (one name for each fact)."""
