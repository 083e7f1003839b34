"""Model + example arguments → `Traced`."""
