"""The cache. Reading order: key (what a prefix is called), policy (what is saved), prefix_tree, stored, lookup, eviction,
reservations and catalog (what the index knows), kvc (an image's bytes), names, extents, leases; all of these are pure. Then the
bytes: arena (shared memory), files and image_root, store with store_memory and store_files, headroom, and tier (the process).
"""
