"""What the user asks: where to cut, how to weigh, where to place, how to run. Knows no graph."""
