"""The public API: a repository, with and without an event loop."""
