"""The tests; their folders mirror the tree, by kind of claim."""
