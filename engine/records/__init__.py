"""What a repository stores beside blobs: log, indexes, names, pins, and what follows from them."""
