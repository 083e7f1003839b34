"""The user's modules: what they hold, what they can reach, what they are called, who listens to their copies."""
