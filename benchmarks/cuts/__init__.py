"""What is needed to judge a cut: its loads by definition, exact cuts of an order, a long search, and a proof."""
