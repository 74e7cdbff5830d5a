"""The check of a collection's plan, derived another way."""
