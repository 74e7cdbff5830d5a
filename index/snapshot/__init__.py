"""What is stored of one directory: structs, keys, bytes, and the rules that they keep."""
