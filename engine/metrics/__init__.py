"""What Prometheus is told: of runs, of a repository's condition, of state stores (one name for each fact)."""
