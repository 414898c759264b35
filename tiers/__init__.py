"""The cache: key, policy, prefix_tree, eviction, kvc (pure); arena, store_memory, store_files (bytes); tier (the process)."""
