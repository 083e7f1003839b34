"""What each worker does and in which order, as pure data: made, proven and simulated before anything runs."""
