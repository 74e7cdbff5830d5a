"""From a commit to a directory: whole, verified and synced, or not at all."""
