"""What a step would take under other schedules, sizes and numbers of ranks: from costs, without running it."""
