"""The root supervisor. Reading order: spec, restarts, tree (pure decisions), spawn (effects), root (the process)."""
