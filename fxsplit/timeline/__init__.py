"""When what was done in a call, measured beside predicted: as numbers, as a trace, as a page."""
