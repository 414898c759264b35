"""Long runs: programs, not collected by pytest."""
