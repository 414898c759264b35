"""Programs for the supervisor's tests, most of which misbehave on purpose."""
