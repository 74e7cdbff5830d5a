"""The verbs of `tidemark`: one file each, named like the verb."""
