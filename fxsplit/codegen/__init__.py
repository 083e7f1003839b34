"""`Traced` + `Assignment` → `Program`: one readable module per stage, and the root that calls them."""
