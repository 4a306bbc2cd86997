"""Training of learned drafters: the target writes its own text, and heads learn to guess it."""
