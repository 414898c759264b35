"""Pure decisions, as tables and properties."""
