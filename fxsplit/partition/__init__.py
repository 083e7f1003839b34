"""`Traced` + `Plan` → `Assignment`: which stage computes a node, and where."""
