"""Claims that every implementation of an interface meets."""
