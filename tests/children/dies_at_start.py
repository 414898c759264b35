"""A child that ends before it says anything."""

import sys

print("the last line explains it", file=sys.stderr)
sys.exit(3)
