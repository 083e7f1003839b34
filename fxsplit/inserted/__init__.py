"""What generated code calls beside torch: transfer, checkpoint, guard; recomputation and random numbers."""
